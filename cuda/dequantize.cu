// dequantize: what tiles hold, as dense f32 rows [kv_head][token][channel].
//
//   value = min + scale · code, product and sum rounded one after the other
//
// One thread owns one word of a tile. Writes every element once, in runs as the tile's order leaves them.
//
// In bounds: threads beyond the last page return; pages and slot were checked on the host, and the rows were made for
// the tokens of the call.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rows.cuh"
#include "common/code_range.cuh"

template <bool VALUE>
__device__ __forceinline__ void dequantize_word(const RowsCall& call) {
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u32 word = (u32)(index % TILE_WORDS<VALUE>);
    const u32 kv_head = (u32)(index / TILE_WORDS<VALUE> % call.kv_heads);
    const u64 page = index / TILE_WORDS<VALUE> / call.kv_heads;
    if (page * TILE_TOKENS >= call.tokens) return;
    const u8* part = (const u8*)call.pages[page] + (u64)kv_head * HEAD_BYTES;
    const u32 packed = ((const u32*)(part + TILE_AT<VALUE>))[word];
#pragma unroll
    for (u32 i = 0; i < FIELDS<VALUE>; i++) {
        const Field field = field_of<VALUE>(word, i);
        const u32 token = (u32)(page * TILE_TOKENS) + field.token;
        if (token >= call.tokens) continue;
        const u32 bits = packed >> field.shift & FIELD_MASK<VALUE>;
        const float2* span_ranges = call.ranges + kv_head * HEAD_DIM;
        const float x = field_value<VALUE>(bits, element_range<VALUE>(part, span_ranges, field.token, field.channel));
        ((float*)call.rows)[((u64)kv_head * call.tokens + token) * HEAD_DIM + field.channel] = x;
    }
}

extern "C" __global__ void dequantize_keys(const RowsCall call) { dequantize_word<false>(call); }

extern "C" __global__ void dequantize_values(const RowsCall call) { dequantize_word<true>(call); }
