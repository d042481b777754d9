// merge_parts: merges the attention states of the same queries over parts that share no tokens. The formula is in
// common/merge_parts.cuh.
//
// A block owns a row of a query head, and a thread owns every (threads)-th channel of it. Every state is read once,
// every log-sum-exp twice.
//
// In bounds: the grid has as many blocks as rows of query heads, and all arrays were checked to hold them, in every part.

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

extern "C" __global__ void merge_parts(const PartsCall call) {
    await_earlier_kernels();
    admit_later_kernels();
    const float* lse = call.lse + blockIdx.x;
    float largest = __uint_as_float(MINUS_INFINITY);
    for (u32 part = 0; part < call.parts; part++) largest = larger(largest, lse[part * call.lse_stride]);
    for (u32 channel = threadIdx.x; channel < call.head_dim; channel += blockDim.x) {
        const u64 at = (u64)blockIdx.x * call.head_dim + channel;
        float weights = 0.0f;
        float sum = 0.0f;
        for (u32 part = 0; part < call.parts; part++) {
            const float weight = part_weight(lse[part * call.lse_stride], largest);
            weights += weight;
            sum += weighted(weight, call.outputs[part * call.output_stride + at]);
        }
        store_element(call.merged, call.merged_type, at, merged_output(sum, weights));
        if (channel == 0 && call.merged_lse != nullptr) call.merged_lse[blockIdx.x] = merged_lse(largest, weights);
    }
}
