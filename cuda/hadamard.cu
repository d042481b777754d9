// hadamard: rotates rows of a dense tensor into dense f32 rows [token][kv_head][channel], and rotates dense f32 rows
// inversely in place.
//
//   y = H (s ⊙ x) / √ORDER,  x = s ⊙ (H y) / √ORDER
//
// One warp owns a row; neighbours own neighbouring channels, so rows are read and written coalesced. Costs log2(ORDER)
// additions per element.
//
// In bounds: warps beyond the last token return; rows were checked on the host, and the output was made for the tokens
// of the call.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rows.cuh"
#include "common/rotation.cuh"

template <bool VALUE>
__device__ __forceinline__ void rotate_row(const RowsCall& call, float* rotated) {
    const u64 index = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (index >= (u64)call.tokens * call.kv_heads) return;
    float row[LANE_CHANNELS];
    load_row(row, call, (u32)(index / call.kv_heads), (u32)(index % call.kv_heads), lane);
    rotate<VALUE>(row, lane);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) rotated[index * HEAD_DIM + lane + 32 * i] = row[i];
}

template <bool VALUE>
__device__ __forceinline__ void rotate_row_back(const RowsCall& call) {
    const u64 index = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (index >= (u64)call.tokens * call.kv_heads) return;
    const u32 token = (u32)(index / call.kv_heads);
    const u32 kv_head = (u32)(index % call.kv_heads);
    float row[LANE_CHANNELS];
    load_row(row, call, token, kv_head, lane);
    rotate_back<VALUE>(row, lane);
    store_row(call, token, kv_head, row, lane);
}

extern "C" __global__ void hadamard_keys(const RowsCall call, float* rotated) { rotate_row<false>(call, rotated); }

extern "C" __global__ void hadamard_values(const RowsCall call, float* rotated) { rotate_row<true>(call, rotated); }

extern "C" __global__ void hadamard_keys_back(const RowsCall call) { rotate_row_back<false>(call); }

extern "C" __global__ void hadamard_values_back(const RowsCall call) { rotate_row_back<true>(call); }
