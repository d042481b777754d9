// key_mean: the mean of some keys, as the centre of a sequence.
//
//   m = (k_1 + … + k_n) · 1 / n
//
// One thread owns one channel of a KV head and adds its elements in token order; neighbours own neighbouring channels, so that rows
// are read coalesced. Elements that are not finite, or beyond `largest`, count as 0. `shrink` is 1 / n.
//
// In bounds: threads beyond the channels of the KV heads return; rows and slot were checked on the host.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rows.cuh"

extern "C" __global__ void key_mean(const RowsCall call) {
    const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= call.kv_heads * TENSOR_CHANNELS) return;
    float sum = 0.0f;
    for (u32 token = 0; token < call.tokens; token++) {
        const float x = element(call, token, index / TENSOR_CHANNELS, index % TENSOR_CHANNELS);
        // False for NaN.
        if (fabsf(x) <= call.largest) sum = __fadd_rn(sum, x);
    }
    call.centre[index] = __fmul_rn(sum, call.shrink);
}
