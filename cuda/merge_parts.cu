// merge_parts: merges the attention states of the same queries over parts that share no tokens. The formula is in
// common/merge_parts.cuh.
//
// A block owns a row of a query head, and a thread owns every (threads)-th channel of it. Every state is read once. Up to
// four parts, so is every log-sum-exp, and a thread of a head with at most as many channels as threads waits for memory
// once.
//
// In bounds: the grid has as many blocks as rows of query heads, and all arrays were checked to hold them, in every
// part. There is at least one part.

#include "common/merge_parts.cuh"
#include "common/elements.cuh"

struct PartsCall {
    // [row][query head][channel] and [row][query head] of the first part; the others follow in these strides.
    const float* outputs;
    const float* lse;
    u64 output_stride;
    u64 lse_stride;
    void* merged;
    // Null if nobody asks for it.
    float* merged_lse;
    u32 parts;
    // Rows times query heads.
    u32 heads;
    u32 head_dim;
    u32 merged_type;
};

// Parts whose loads are under way together: one after the other, every part would wait for memory.
constexpr u32 TOGETHER = 4;

// Some parts of a channel, from `first` on. What lies behind the last part repeats it.
struct Group {
    float lse[TOGETHER];
    float output[TOGETHER];

    __device__ __forceinline__ Group(const PartsCall& call, u32 first, u64 at) {
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            const u32 part = min(first + i, call.parts - 1);
            lse[i] = call.lse[part * call.lse_stride + blockIdx.x];
            output[i] = call.outputs[part * call.output_stride + at];
        }
    }
};

extern "C" __global__ void merge_parts(const PartsCall call) {
    await_earlier_kernels();
    admit_later_kernels();
    const u64 row = (u64)blockIdx.x * call.head_dim;
    // The outputs of the first parts are loaded together with their log-sum-exps.
    Group group(call, 0, row + min(threadIdx.x, call.head_dim - 1));
    float largest = __uint_as_float(MINUS_INFINITY);
#pragma unroll
    for (u32 i = 0; i < TOGETHER; i++) largest = larger(largest, group.lse[i]);
    for (u32 part = TOGETHER; part < call.parts; part++) {
        largest = larger(largest, call.lse[part * call.lse_stride + blockIdx.x]);
    }
    for (u32 channel = threadIdx.x; channel < call.head_dim; channel += blockDim.x) {
        float weights = 0.0f;
        float sum = 0.0f;
        for (u32 first = 0; first < call.parts; first += TOGETHER) {
            if (first > 0 || channel != threadIdx.x) group = Group(call, first, row + channel);
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) {
                if (first + i >= call.parts) break;
                const float weight = part_weight(group.lse[i], largest);
                weights += weight;
                sum += weighted(weight, group.output[i]);
            }
        }
        store_element(call.merged, call.merged_type, row + channel, merged_output(sum, weights));
        if (channel == 0 && call.merged_lse != nullptr) call.merged_lse[blockIdx.x] = merged_lse(largest, weights);
    }
}
