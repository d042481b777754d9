// dequantize: decodes tiles into dense f32 rows [kv_head][token][channel].
//
// value = min + scale · code, the product and the sum each rounded
//
// One thread owns one unit of a tile (a word, or three at 3 bits). Every element is written once, in stretches that
// follow the tile's order. For sketched keys the signs are written first, and the levels are added once the signs are
// back in their basis.
//
// In bounds: threads beyond the last page return; pages and slot were checked on the host, and the rows were made for
// the tokens of the call.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rows.cuh"
#include "common/code_range.cuh"

// Calls `put(element, field, range)` for every element of a thread's unit.
template <bool VALUE, typename Put>
__device__ __forceinline__ void dequantize_unit(const RowsCall& call, Put put) {
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u32 unit = (u32)(index % UNITS<VALUE>);
    const u32 kv_head = (u32)(index / UNITS<VALUE> % call.kv_heads);
    const u64 page = index / UNITS<VALUE> / call.kv_heads;
    if (page * TILE_TOKENS >= call.tokens) return;
    const u8* part = (const u8*)call.pages[page] + (u64)kv_head * HEAD_BYTES;
    Unit<VALUE> packed;
    packed.load((const u32*)(part + TILE_AT<VALUE>), unit);
#pragma unroll
    for (u32 i = 0; i < FIELDS<VALUE>; i++) {
        const Field field = field_of<VALUE>(unit, i);
        const u32 token = (u32)(page * TILE_TOKENS) + field.token;
        if (token >= call.tokens || field.channel >= TENSOR_CHANNELS) continue;
        const float2* span_ranges = call.ranges + kv_head * HEAD_DIM;
        const float2 range = element_range<VALUE>(part, span_ranges, field.token, field.channel);
        float* row = (float*)call.rows + ((u64)kv_head * call.tokens + token) * TENSOR_CHANNELS;
        put(row[field.channel], packed.get(i, field.shift), range);
    }
}

template <bool VALUE>
__device__ __forceinline__ void dequantize_levels(const RowsCall& call) {
    dequantize_unit<VALUE>(call, [](float& x, u32 field, float2 range) {
        const float value = field_value<VALUE>(field, range);
        x = SKETCHED<VALUE> ? __fadd_rn(x, value) : value;
    });
}

template <bool VALUE>
__device__ __forceinline__ void dequantize_sketch(const RowsCall& call) {
    if constexpr (SKETCHED<VALUE>) {
        dequantize_unit<VALUE>(call, [](float& x, u32 field, float2 range) {
            x = sketched_sign<VALUE>(field ^ FLIPPED<VALUE>, range.y);
        });
    }
}

extern "C" __global__ void dequantize_key_signs(const RowsCall call) { dequantize_sketch<false>(call); }

extern "C" __global__ void dequantize_keys(const RowsCall call) { dequantize_levels<false>(call); }

extern "C" __global__ void dequantize_values(const RowsCall call) { dequantize_levels<true>(call); }
