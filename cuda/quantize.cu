// quantize: packs rows of a dense tensor into tiles, with known ranges.
//
//   code = the level of `min + scale · code` nearest to the element, ties to even; f16 rounds to nearest even
//
// One thread owns one unit of a tile (a word, or three at 3 bits) and gathers its elements; neighbours own neighbouring
// units, so tiles are written coalesced. Fields of tokens beyond the span, and of channels beyond the head, are zero
// bits. Every element is read once. Rows that are coded whole arrive as fields (code_rows.cu).
//
// In bounds: threads beyond the last page return; pages, slot and rows were checked on the host.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rows.cuh"
#include "common/code_range.cuh"

template <bool VALUE>
__device__ __forceinline__ void quantize_unit(const RowsCall& call) {
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u32 unit = (u32)(index % UNITS<VALUE>);
    const u32 kv_head = (u32)(index / UNITS<VALUE> % call.kv_heads);
    const u64 page = index / UNITS<VALUE> / call.kv_heads;
    if (page * TILE_TOKENS >= call.tokens) return;
    u8* part = (u8*)call.pages[page] + (u64)kv_head * HEAD_BYTES;
    Unit<VALUE> packed = Unit<VALUE>::zeros();
#pragma unroll
    for (u32 i = 0; i < FIELDS<VALUE>; i++) {
        const Field field = field_of<VALUE>(unit, i);
        const u32 token = (u32)(page * TILE_TOKENS) + field.token;
        if (token >= call.tokens || field.channel >= TENSOR_CHANNELS) continue;
        const float x = element(call, token, kv_head, field.channel);
        const float2* span_ranges = call.ranges + kv_head * HEAD_DIM;
        const float2 range = element_range<VALUE>(part, span_ranges, field.token, field.channel);
        packed.put(i, field.shift, field_bits<VALUE>(x, range));
    }
    packed.store((u32*)(part + TILE_AT<VALUE>), unit);
}

extern "C" __global__ void quantize_keys(const RowsCall call) { quantize_unit<false>(call); }

extern "C" __global__ void quantize_values(const RowsCall call) { quantize_unit<true>(call); }
