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
    // [part][row][query head][channel] and [part][row][query head].
    const float* outputs;
    const float* lse;
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
    const float* lse = call.lse + blockIdx.x;
    float largest = __uint_as_float(MINUS_INFINITY);
    for (u32 part = 0; part < call.parts; part++) largest = larger(largest, lse[(u64)part * call.heads]);
    for (u32 channel = threadIdx.x; channel < call.head_dim; channel += blockDim.x) {
        const u64 at = (u64)blockIdx.x * call.head_dim + channel;
        float weights = 0.0f;
        float sum = 0.0f;
        for (u32 part = 0; part < call.parts; part++) {
            const float weight = part_weight(lse[(u64)part * call.heads], largest);
            weights += weight;
            sum += weighted(weight, call.outputs[(u64)part * call.heads * call.head_dim + at]);
        }
        store_element(call.merged, call.merged_type, at, merged_output(sum, weights));
        if (channel == 0 && call.merged_lse != nullptr) call.merged_lse[blockIdx.x] = merged_lse(largest, weights);
    }
}
