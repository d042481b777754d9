// uncentre_lse: turns log-sum-exps over centred keys into those over the original keys.
//
//   lse = lse + q·m · scale
//
// A warp owns a query of a query head, and its lanes share the channels. A log-sum-exp of −∞ (no tokens) stays.
//
// In bounds: warps past the last log-sum-exp return; queries, slots and log-sum-exps were checked to be of as many
// rows, and slots to be below those of the centres.

#include "common/ptx.cuh"
#include "common/elements.cuh"

struct UncentreCall {
    const void* queries;
    // [slot][kv head][channel].
    const float* centres;
    // The slot of the centre of every query.
    const u32* slots;
    float* lse;
    u32 query_type;
    u32 query_heads;
    u32 kv_heads;
    u32 head_dim;
    // Queries of query heads.
    u32 total;
    // 1 / √head_dim.
    float scale;
};

extern "C" __global__ void uncentre_lse(const UncentreCall call) {
    const u32 index = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const u32 lane = threadIdx.x % 32;
    if (index >= call.total) return;
    const u32 kv_head = index % call.query_heads / (call.query_heads / call.kv_heads);
    const u64 centre = ((u64)call.slots[index / call.query_heads] * call.kv_heads + kv_head) * call.head_dim;
    float product = 0.0f;
    for (u32 channel = lane; channel < call.head_dim; channel += 32) {
        const float q = load_element(call.queries, call.query_type, (u64)index * call.head_dim + channel);
        product += q * call.centres[centre + channel];
    }
#pragma unroll
    for (int half = 16; half > 0; half /= 2) product += __shfl_xor_sync(0xffffffffu, product, half);
    if (lane == 0) call.lse[index] += product * call.scale;
}
