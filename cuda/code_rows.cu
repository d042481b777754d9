// code_rows: codes rotated rows as fields, in place, and writes the norms of their tiles, for formats whose fields and
// norms depend on whole rows: codes and signs of sketched keys, and codes with norms divided by the norm of their
// levels. It also turns decoded signs back into the basis of the levels, in place.
//
//   r = x − norm · level,  sign of R r,  x = norm · level + Rᵀ (|r| · ± level of a sketch);  norm / |level|
//
// One warp owns a row; neighbours own neighbouring channels. `quantize` writes the fields into the tiles.
//
// In bounds: warps beyond the last tile return, and those beyond the last token read no row; pages and rows were checked
// on the host.

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
        const u32 tiles = (call.tokens + TILE_TOKENS - 1u) / TILE_TOKENS;
        if (index >= (u64)tiles * TILE_TOKENS * call.kv_heads) return;
        const u32 token = (u32)(index / call.kv_heads);
        const u32 kv_head = (u32)(index % call.kv_heads);
        // Tokens that do not exist have no row, and no norm of an earlier span.
        const u32 word = token < call.tokens ? code_row<VALUE>((float*)call.rows + index * HEAD_DIM, lane) : 0u;
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
