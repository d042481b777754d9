// A tile of rows that stays in registers while others pass by, multiplied by MMAs: the resident rows are the A operand, the
// passing ones the 8 columns of the B operand.
//
// A warp owns 16 · M_TILES resident rows. Since a sum over channels may take them in any order, lane c of a quad takes the
// channels 16 f + 4 c .. + 4 of step f, of both operands: 8 bytes of a 16-bit row, so that a quad reads a whole sector.
//
// Halves hold f16 exactly, and bf16 within the range of normal halves. f32 elements are two halves, x = high + low, and a
// product is high · high + high · low + low · high: about 22 bits.
//
// Macros: HEAD_DIM, KEY_TYPE (of the resident rows), QUERY_TYPE (of the passing ones), KEYS_ALIGNED and QUERIES_ALIGNED
// (every row begins at a multiple of 4 elements).

#pragma once

#include "common/ptx.cuh"
#include "common/elements.cuh"

constexpr u32 STEPS = HEAD_DIM / 16;
constexpr bool KEYS_SPLIT = KEY_TYPE == ELEMENTS_F32;
constexpr bool QUERIES_SPLIT = QUERY_TYPE == ELEMENTS_F32;
// 16-row tiles of a warp, by the registers they take.
constexpr u32 M_TILES = KEYS_SPLIT ? 1 : 2;
constexpr u32 WARPS = 8;
constexpr u32 WARP_ROWS = 16 * M_TILES;
constexpr u32 TILE_ROWS = WARPS * WARP_ROWS;
// Passing rows that are staged at once.
constexpr u32 STAGED = 32;
// Words of a staged row, so that a quarter warp's loads fall into different banks.
constexpr u32 STAGED_WORDS = HEAD_DIM / 2 + (HEAD_DIM % 32 == 0 ? 8 : 0);

// Aligned for loads of 8 bytes.
struct __align__(16) StagedRows {
    u32 high[STAGED][STAGED_WORDS];
    u32 low[QUERIES_SPLIT ? STAGED : 1][STAGED_WORDS];
};

struct Resident {
    u32 high[M_TILES][STEPS][4];
    u32 low[KEYS_SPLIT ? M_TILES : 1][STEPS][4];
};

// Four elements as two pairs of halves, and what these leave of f32 elements.
template <u32 TYPE, bool ALIGNED>
__device__ __forceinline__ void load_four(u32 (&high)[2], u32 (&low)[2], const void* elements, u64 index) {
    if constexpr (TYPE == ELEMENTS_F16 && ALIGNED) {
        const uint2 words = *(const uint2*)((const u16*)elements + index);
        high[0] = words.x;
        high[1] = words.y;
    } else {
        float x[4];
        if constexpr (TYPE == ELEMENTS_F32 && ALIGNED) {
            const float4 four = *(const float4*)((const float*)elements + index);
            x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        } else {
#pragma unroll
            for (u32 i = 0; i < 4; i++) x[i] = load_element(elements, TYPE, index + i);
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            high[i] = half_pair(x[2 * i], x[2 * i + 1]);
            if constexpr (TYPE == ELEMENTS_F32) {
                low[i] = half_pair(x[2 * i] - half_value(high[i] & 0xffffu), x[2 * i + 1] - half_value(high[i] >> 16));
            }
        }
    }
}

// Row `row` of a tile of 16 lies in words 0 and 2 of an A fragment, row + 8 in words 1 and 3.
__device__ __forceinline__ void load_resident_row(Resident& resident, u32 tile, u32 half, const void* rows, u64 start,
                                                  bool exists, u32 lane) {
#pragma unroll
    for (u32 f = 0; f < STEPS; f++) {
        u32 high[2] = {0, 0};
        u32 low[2] = {0, 0};
        if (exists) {
            load_four<KEY_TYPE, KEYS_ALIGNED != 0>(high, low, rows, start + 16 * f + 4 * (lane % 4));
        }
        resident.high[tile][f][half] = high[0];
        resident.high[tile][f][2 + half] = high[1];
        if constexpr (KEYS_SPLIT) {
            resident.low[tile][f][half] = low[0];
            resident.low[tile][f][2 + half] = low[1];
        }
    }
}

// Four channels of a staged row.
__device__ __forceinline__ void stage_four(StagedRows& staged, u32 row, u32 four, const void* rows, u64 start,
                                           bool exists) {
    u32 high[2] = {0, 0};
    u32 low[2] = {0, 0};
    if (exists) load_four<QUERY_TYPE, QUERIES_ALIGNED != 0>(high, low, rows, start + 4 * four);
    *(uint2*)&staged.high[row][2 * four] = make_uint2(high[0], high[1]);
    if constexpr (QUERIES_SPLIT) *(uint2*)&staged.low[row][2 * four] = make_uint2(low[0], low[1]);
}

// Products of the warp's resident rows with the 8 staged rows from `first` on. Of tile m, products[m][0] and [1] are of row
// lane / 4 with columns 2 (lane % 4) and the one after, [2] and [3] of row lane / 4 + 8.
__device__ __forceinline__ void multiply_staged(float (&products)[M_TILES][4], const Resident& resident,
                                                const StagedRows& staged, u32 first, u32 lane) {
#pragma unroll
    for (u32 m = 0; m < M_TILES; m++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) products[m][i] = 0.0f;
    }
    const u32 row = first + lane / 4;
#pragma unroll
    for (u32 f = 0; f < STEPS; f++) {
        const uint2 b = *(const uint2*)&staged.high[row][8 * f + 2 * (lane % 4)];
#pragma unroll
        for (u32 m = 0; m < M_TILES; m++) {
            multiply_f16(products[m], resident.high[m][f], b.x, b.y);
            if constexpr (KEYS_SPLIT) multiply_f16(products[m], resident.low[m][f], b.x, b.y);
        }
        if constexpr (QUERIES_SPLIT) {
            const uint2 rest = *(const uint2*)&staged.low[row][8 * f + 2 * (lane % 4)];
#pragma unroll
            for (u32 m = 0; m < M_TILES; m++) multiply_f16(products[m], resident.high[m][f], rest.x, rest.y);
        }
    }
}
