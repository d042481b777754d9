// ranges_tile: the ranges of single tokens beside the tiles.
//
//   scale = (max - min) · shrink / (2^bits - 1),  min = min · shrink,  both rounded to half precision
//
// One warp owns one slot of a tile and reads its token's row, neighbours neighbouring channels. Slots that no token
// belongs to get zero. Reads every element once.
//
// In bounds: warps beyond the last page return; pages and rows were checked on the host.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rows.cuh"
#include "common/code_range.cuh"

template <bool VALUE>
__device__ __forceinline__ void tile_range(const RowsCall& call) {
    constexpr int bits = FORMAT_BITS<VALUE> == 16 ? 8 : FORMAT_BITS<VALUE>;
    const u64 warp = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const u32 lane = threadIdx.x % 32;
    const u32 slot = (u32)(warp % TILE_TOKENS);
    const u32 kv_head = (u32)(warp / TILE_TOKENS % call.kv_heads);
    const u64 page = warp / TILE_TOKENS / call.kv_heads;
    if (page * TILE_TOKENS >= call.tokens) return;
    const u32 token = (u32)(page * TILE_TOKENS) + slot;
    u32 word = 0u;
    if (token < call.tokens) {
        float low = element(call, token, kv_head, lane);
        float high = low;
        for (u32 channel = lane + 32; channel < HEAD_DIM; channel += 32) {
            const float x = element(call, token, kv_head, channel);
            low = fminf(low, x);
            high = fmaxf(high, x);
        }
        for (int step = 16; step > 0; step >>= 1) {
            low = fminf(low, __shfl_xor_sync(ALL_LANES, low, step));
            high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, step));
        }
        word = range_word(code_range<bits>(low, high, call.shrink));
    }
    if (lane == 0) ((u32*)(call.pages[page] + (u64)kv_head * HEAD_BYTES + TILE_RANGES_AT<VALUE>))[slot] = word;
}

extern "C" __global__ void ranges_tile_keys(const RowsCall call) { tile_range<false>(call); }

extern "C" __global__ void ranges_tile_values(const RowsCall call) { tile_range<true>(call); }
