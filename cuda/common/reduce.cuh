// Sums and maxima over the lanes of a warp.

#pragma once

#include "common/ptx.cuh"

__device__ __forceinline__ float warp_sum(float x) {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// The larger of both. NaN counts as larger than any number, so that it is not lost.
__device__ __forceinline__ float larger(float a, float b) { return a != a || b != b ? a + b : fmaxf(a, b); }

__device__ __forceinline__ float warp_max(float x) {
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// The largest of all lanes. Integers in the order of floats take one instruction.
__device__ __forceinline__ float max_of_warp(float x) {
    const int bits = __float_as_int(x);
    const int top = __reduce_max_sync(ALL_LANES, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(top ^ (top >> 31 & 0x7fffffff));
}

// The largest over the 8 lanes that hold other tokens of the same heads or rows.
__device__ __forceinline__ float max_of_tokens(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 4));
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 8));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 16));
}

// The sum over the 4 lanes that hold columns of the same rows.
__device__ __forceinline__ float sum_of_columns(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

__device__ __forceinline__ float sum_of_tokens(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 4);
    x += __shfl_xor_sync(ALL_LANES, x, 8);
    return x + __shfl_xor_sync(ALL_LANES, x, 16);
}
