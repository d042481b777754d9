// ranges_tile: the tile ranges, for groups that lie within a tile.
//
//   scale = (max - min) · shrink / (2^bits - 1),  min = min · shrink,  both rounded to half precision
//
// One warp owns one range and reads its group. Neighbouring lanes own neighbouring channels of a token, or tokens of a
// channel whose neighbour belongs to the next warp. Groups without a token get zero. Every element is read once.
//
// In bounds: warps beyond the last page return; pages and rows were checked on the host.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rows.cuh"
#include "common/code_range.cuh"

template <bool VALUE>
__device__ __forceinline__ u32 tile_range(const RowsCall& call, u32 page_token, u32 kv_head, u32 range, int lane) {
    if constexpr (GROUP_CHANNELS<VALUE> == 1) {
        const u32 token = page_token + range / HEAD_DIM * GROUP_TOKENS<VALUE>;
        if (token >= call.tokens) return 0u;
        const auto at = [&](u32 i) { return element(call, token + i, kv_head, range % HEAD_DIM); };
        return warp_range<VALUE>(min(GROUP_TOKENS<VALUE>, call.tokens - token), lane, call.shrink, at);
    } else {
        const u32 token = page_token + range % TILE_TOKENS;
        if (token >= call.tokens) return 0u;
        const u32 channel = range / TILE_TOKENS * GROUP_CHANNELS<VALUE>;
        const auto at = [&](u32 i) { return element(call, token, kv_head, channel + i); };
        return warp_range<VALUE>(GROUP_ELEMENTS<VALUE>, lane, call.shrink, at);
    }
}

template <bool VALUE>
__device__ __forceinline__ void store_tile_range(const RowsCall& call) {
    if constexpr (TILE_RANGES<VALUE>) {
        const u64 warp = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
        const int lane = threadIdx.x % 32;
        const u32 range = (u32)(warp % RANGES<VALUE>);
        const u32 kv_head = (u32)(warp / RANGES<VALUE> % call.kv_heads);
        const u64 page = warp / RANGES<VALUE> / call.kv_heads;
        if (page * TILE_TOKENS >= call.tokens) return;
        const u32 word = tile_range<VALUE>(call, (u32)(page * TILE_TOKENS), kv_head, range, lane);
        u32* ranges = (u32*)(call.pages[page] + (u64)kv_head * HEAD_BYTES + TILE_RANGES_AT<VALUE>);
        if (lane == 0) ranges[range] = word;
    }
}

extern "C" __global__ void ranges_tile_keys(const RowsCall call) { store_tile_range<false>(call); }

extern "C" __global__ void ranges_tile_values(const RowsCall call) { store_tile_range<true>(call); }
