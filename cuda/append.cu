// append: single tokens of a dense tensor into slots of open pages: f16, or codes whose ranges belong to single tokens.
//
// One warp owns a token of one KV head: it reads the row, rotates it where it is stored so, makes and stores its ranges,
// and then the bytes of the tile that belong to it. A byte that holds other tokens too is read and kept; the host puts
// tokens that share bytes into launches of their own. Tokens are read coalesced, keys written in words, values in bytes
// four apart.
//
// In bounds: warps beyond the last token return; tokens, pages and slots were checked on the host, and no slot is named
// twice.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rows.cuh"
#include "common/rotation.cuh"
#include "common/code_range.cuh"

constexpr int APPEND_WARPS = 8;

// The units of a tile that hold a token, of one load after the other (of top bits at 3 bits).
template <bool VALUE>
struct SlotUnits {
    static constexpr u32 RUN = VALUE ? VALUE_RUN : BLOCK_TOKENS;
    static constexpr u32 BLOCKS = VALUE ? VALUE_BLOCKS : KEY_BLOCKS;
    static constexpr u32 PLANES = UNIT_PLANES<VALUE>;
    static constexpr u32 PER_LOAD = VALUE ? 16 : 8;

    u32 slot;

    __device__ __forceinline__ u32 first_load() const { return slot / RUN * BLOCKS / PLANES; }

    __device__ __forceinline__ u32 count() const {
        return ((slot / RUN * BLOCKS + BLOCKS - 1) / PLANES - first_load() + 1) * PER_LOAD;
    }

    // Unit i of them: lane 4 g + c of a load and register r, of which the slot fixes some.
    __device__ __forceinline__ u32 unit(u32 i) const {
        const u32 load = first_load() + i / PER_LOAD;
        const u32 half = slot % 16 / 8;
        const u32 g = VALUE ? i % 8 : slot % 8;
        const u32 c = VALUE ? slot % 8 / 2 : i % 4;
        const u32 r = VALUE ? i / 8 % 2 + 2 * half : half + 2 * (i / 4 % 2);
        return load * 128 + (4 * g + c) * 4 + r;
    }
};

// Writes the bytes of a word that `mask` touches.
__device__ __forceinline__ void put_bytes(u8* bytes, u32 packed, u32 mask) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 touched = mask >> 8 * i & 0xffu;
        const u32 fields = packed >> 8 * i & 0xffu;
        if (touched == 0xffu) {
            bytes[i] = (u8)fields;
        } else if (touched != 0u) {
            bytes[i] = (u8)(bytes[i] & ~touched | fields);
        }
    }
}

// Only formats that take single tokens get here: f16, or ranges that do not span tokens.
template <bool VALUE>
__device__ __forceinline__ void append_row(const RowsCall& call) {
    __shared__ float rows[APPEND_WARPS][HEAD_DIM];
    __shared__ u16 fields[APPEND_WARPS][HEAD_DIM];
    const u32 warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const u64 index = (u64)blockIdx.x * APPEND_WARPS + warp;
    const u32 kv_head = (u32)(index % call.kv_heads);
    if (index / call.kv_heads >= call.tokens) return;
    const TokenPlace place = ((const TokenPlace*)call.pages)[index / call.kv_heads];
    u8* part = (u8*)(place.page + (u64)kv_head * HEAD_BYTES);

    float row[LANE_CHANNELS];
    load_row(row, call, place.token, kv_head, lane);
    rotate<VALUE>(row, lane);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) rows[warp][lane + 32 * i] = row[i];
    __syncwarp();
    if constexpr (CODED_ROWS<VALUE>) {
        const u32 word = code_row<VALUE>(rows[warp], lane);
        if (lane == 0) ((u32*)(part + TILE_RANGES_AT<VALUE>))[place.slot] = word;
    } else if constexpr (TILE_RANGES<VALUE>) {
        for (u32 channel = 0; channel < TENSOR_CHANNELS; channel += GROUP_CHANNELS<VALUE>) {
            const auto at = [&](u32 i) { return rows[warp][channel + i]; };
            const u32 word = warp_range<VALUE>(GROUP_ELEMENTS<VALUE>, lane, call.shrink, at);
            if (lane == 0) ((u32*)(part + TILE_RANGES_AT<VALUE>))[range_index<VALUE>(place.slot, channel)] = word;
        }
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        const u32 channel = lane + 32 * i;
        const float2 range = element_range<VALUE>(part, nullptr, place.slot, channel);
        fields[warp][channel] = channel < TENSOR_CHANNELS ? (u16)field_bits<VALUE>(rows[warp][channel], range) : (u16)0;
    }
    __syncwarp();

    const SlotUnits<VALUE> units = {place.slot};
    for (u32 i = lane; i < units.count(); i += 32) {
        const u32 unit = units.unit(i);
        Unit<VALUE> packed = Unit<VALUE>::zeros();
        Unit<VALUE> mask = Unit<VALUE>::zeros();
#pragma unroll
        for (u32 f = 0; f < FIELDS<VALUE>; f++) {
            const Field field = field_of<VALUE>(unit, f);
            if (field.token != place.slot) continue;
            packed.put(f, field.shift, fields[warp][field.channel]);
            mask.put(f, field.shift, FIELD_MASK<VALUE>);
        }
#pragma unroll
        for (u32 k = 0; k < UNIT_WORDS<VALUE>; k++) {
            put_bytes(part + TILE_AT<VALUE> + 4 * Unit<VALUE>::word(unit, k), packed.words[k], mask.words[k]);
        }
    }
}

extern "C" __global__ void append_keys(const RowsCall call) { append_row<false>(call); }

extern "C" __global__ void append_values(const RowsCall call) { append_row<true>(call); }
