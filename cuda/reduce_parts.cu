// reduce_parts: the sum or the largest of the same elements of several parts, in the order of the parts.
//
// A thread owns every (threads)-th element.
//
// In bounds: both arrays were checked to hold the elements, `parts` in every one of them.

#include "common/merge_parts.cuh"

struct ReduceCall {
    // [part][element].
    const float* parts;
    float* reduced;
    u32 count;
    u32 elements;
    u32 takes_largest;
    u32 unused;
};

extern "C" __global__ void reduce_parts(const ReduceCall call) {
    for (u32 e = blockIdx.x * blockDim.x + threadIdx.x; e < call.elements; e += gridDim.x * blockDim.x) {
        float joined = call.parts[e];
        for (u32 part = 1; part < call.count; part++) {
            const float x = call.parts[(u64)part * call.elements + e];
            joined = call.takes_largest != 0u ? larger(joined, x) : joined + x;
        }
        call.reduced[e] = joined;
    }
}
