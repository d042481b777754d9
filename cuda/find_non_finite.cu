// find_non_finite: the first element, in token order, that is NaN, infinite or beyond ±largest.
//
// One thread checks FINITE_CHUNK elements; neighbours check neighbouring ones. A thread records what it finds with an
// atomic minimum of (token · kv_heads + kv_head) · head_dim + channel, which starts above all of them.
//
// In bounds: threads beyond the last element return; the tensor was checked against its layout on the host.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rows.cuh"

constexpr u32 FINITE_CHUNK = 8;

extern "C" __global__ void find_non_finite(const RowsCall call, u64* found) {
    const u64 total = (u64)call.tokens * call.kv_heads * TENSOR_CHANNELS;
    const u64 first = (u64)blockIdx.x * blockDim.x * FINITE_CHUNK + threadIdx.x;
    for (u32 i = 0; i < FINITE_CHUNK; i++) {
        const u64 index = first + i * blockDim.x;
        if (index >= total) return;
        const u32 channel = (u32)(index % TENSOR_CHANNELS);
        const u32 kv_head = (u32)(index / TENSOR_CHANNELS % call.kv_heads);
        const float x = element(call, (u32)(index / TENSOR_CHANNELS / call.kv_heads), kv_head, channel);
        // False for NaN.
        if (!(fabsf(x) <= call.largest)) {
            atomicMin(found, index);
            return;
        }
    }
}
