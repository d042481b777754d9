// Sums and maxima over the lanes of a warp.

#pragma once

#include "common/ptx.cuh"

__device__ __forceinline__ float warp_sum(float x) {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// The largest over the 8 lanes that hold other tokens of the same heads or rows.
__device__ __forceinline__ float max_of_tokens(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 4));
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 8));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 16));
}

__device__ __forceinline__ float sum_of_tokens(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 4);
    x += __shfl_xor_sync(ALL_LANES, x, 8);
    return x + __shfl_xor_sync(ALL_LANES, x, 16);
}
