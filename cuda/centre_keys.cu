// centre_keys: subtracts the centre of their sequence from keys of a dense tensor, rotates them if the format does, and
// writes dense f32 rows [token][kv_head][channel].
//
// One warp owns a row; neighbours own neighbouring channels, so rows are read and written coalesced.
//
// In bounds: warps beyond the last token return; rows and slot were checked on the host, and the output was made for
// the tokens of the call.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rows.cuh"
#include "common/rotation.cuh"

extern "C" __global__ void centre_keys(const RowsCall call, float* centred) {
    const u64 index = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (index >= (u64)call.tokens * call.kv_heads) return;
    const u32 kv_head = (u32)(index % call.kv_heads);
    float row[LANE_CHANNELS];
    load_row(row, call, (u32)(index / call.kv_heads), kv_head, lane);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        const u32 channel = lane + 32 * i;
        if (channel < TENSOR_CHANNELS) row[i] = __fsub_rn(row[i], call.centre[kv_head * TENSOR_CHANNELS + channel]);
    }
    rotate<false>(row, lane);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) centred[index * HEAD_DIM + lane + 32 * i] = row[i];
}
