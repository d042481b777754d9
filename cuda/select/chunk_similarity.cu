// chunk_similarity: the cosine similarity of every chunk's embedding with the query's. An embedding of zeros gives 0.
//
//   similarity = q · c / (‖q‖ ‖c‖)
//
// One warp owns a chunk. Its lanes own every 32nd element, and the three sums are added over the lanes in a fixed
// order.
//
// In bounds: warps beyond the chunks return; embeddings were checked against the call on the host.

#pragma once

#include "common/ptx.cuh"
#include "common/elements.cuh"

struct SimilarityCall {
    u64 query;
    u64 chunks;
    u64 similarities;
    u32 query_type;
    u32 chunk_type;
    u32 width;
    u32 count;
};

extern "C" __global__ void chunk_similarity(const SimilarityCall call) {
    const u32 chunk = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (chunk >= call.count) return;
    float sums[3] = {0.0f, 0.0f, 0.0f};
    for (u32 i = threadIdx.x % 32; i < call.width; i += 32) {
        const float q = load_element((const void*)call.query, call.query_type, i);
        const float c = load_element((const void*)call.chunks, call.chunk_type, (u64)chunk * call.width + i);
        sums[0] += q * q;
        sums[1] += c * c;
        sums[2] += q * c;
    }
#pragma unroll
    for (u32 i = 0; i < 3; i++) {
#pragma unroll
        for (u32 distance = 16; distance > 0; distance /= 2) sums[i] += __shfl_xor_sync(ALL_LANES, sums[i], distance);
    }
    if (threadIdx.x % 32 == 0) {
        const float norms = sqrtf(sums[0]) * sqrtf(sums[1]);
        // An embedding with NaN gives NaN, which a search refuses: no comparison with NaN is true.
        ((float*)call.similarities)[chunk] = norms == 0.0f ? 0.0f : sums[2] / norms;
    }
}
