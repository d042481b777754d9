// compute_guard: a fixed chain of multiply-adds, whose duration depends only on the clock.
//
// Every thread of every block runs GUARD_STEPS dependent operations and writes its result, so that the compiler cannot
// leave any out.
//
// In bounds: one float for each thread of the grid.

#pragma once

#include "common/ptx.cuh"

constexpr u32 GUARD_STEPS = 1u << 15;

extern "C" __global__ void __launch_bounds__(256) compute_guard(float* results) {
    const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    float x = (float)index;
#pragma unroll 16
    for (u32 i = 0; i < GUARD_STEPS; i++) x = __fmaf_rn(x, 0.999f, 0.5f);
    results[index] = x;
}
