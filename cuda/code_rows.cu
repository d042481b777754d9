// code_rows: codes rotated rows as fields, in place, and writes the norms of their tiles, for formats whose fields and
// norms depend on whole rows: codes and signs of sketched keys, and codes with norms divided by the norm of their
// levels. It also turns decoded signs back into the basis of the levels, in place.
//
//   r = x − norm · level,  sign of R r,  x = norm · level + Rᵀ (|r| · ± level of a sketch);  norm / |level|
//
// One warp owns a row; neighbours own neighbouring channels. `quantize` writes the fields into the tiles.
//
// In bounds: warps beyond the last token return; pages and rows were checked on the host.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rows.cuh"
#include "common/sketch.cuh"

// Rows are f32 [token][kv head][channel] of HEAD_DIM channels.
template <bool VALUE>
__device__ __forceinline__ void code_rows(const RowsCall& call) {
    if constexpr (CODED_ROWS<VALUE>) {
        const u64 index = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
        const int lane = threadIdx.x % 32;
        if (index >= (u64)call.tokens * call.kv_heads) return;
        const u32 token = (u32)(index / call.kv_heads);
        const u32 kv_head = (u32)(index % call.kv_heads);
        const u32 word = code_row<VALUE>((float*)call.rows + index * HEAD_DIM, lane);
        u32* ranges = (u32*)(call.pages[token / TILE_TOKENS] + (u64)kv_head * HEAD_BYTES + TILE_RANGES_AT<VALUE>);
        if (lane == 0) ranges[token % TILE_TOKENS] = word;
    }
}

template <bool VALUE>
__device__ __forceinline__ void sketch_rows_back(const RowsCall& call) {
    if constexpr (SKETCHED<VALUE>) {
        const u64 index = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
        const int lane = threadIdx.x % 32;
        if (index >= (u64)call.tokens * call.kv_heads) return;
        const u32 token = (u32)(index / call.kv_heads);
        const u32 kv_head = (u32)(index % call.kv_heads);
        float row[LANE_CHANNELS];
        load_row(row, call, token, kv_head, lane);
        rotate_sketch_back<VALUE>(row, lane);
        store_row(call, token, kv_head, row, lane);
    }
}

extern "C" __global__ void code_keys(const RowsCall call) { code_rows<false>(call); }

extern "C" __global__ void code_values(const RowsCall call) { code_rows<true>(call); }

extern "C" __global__ void sketch_keys_back(const RowsCall call) { sketch_rows_back<false>(call); }
