// A warp writes one rotated row into a slot of a tile: its ranges, then the bytes that belong to it.
//
// A byte that also holds fields of other tokens is changed bit by bit, because those tokens may be stored at the same
// time. Nobody else changes the bits of a token's field, so the bits that differ can be flipped. Keys are written in
// words, values in bytes four apart.

#pragma once

#include "common/tile.cuh"
#include "common/rows.cuh"
#include "common/rotation.cuh"
#include "common/code_range.cuh"

// Shared memory of a warp.
struct StagedRow {
    float* row;
    u16* fields;
};

// The units of a tile that hold a token, one load after the other (of top bits at 3 bits).
template <bool VALUE>
struct SlotUnits {
    static constexpr u32 RUN = VALUE ? VALUE_RUN : BLOCK_TOKENS;
    static constexpr u32 BLOCKS = VALUE ? VALUE_BLOCKS : KEY_BLOCKS;
    static constexpr u32 PLANES = UNIT_PLANES<VALUE>;
    static constexpr u32 PER_LOAD = VALUE ? 16 : 8;

    u32 slot;

    __device__ __forceinline__ u32 first_load() const { return slot / RUN * BLOCKS / PLANES; }

    __device__ __forceinline__ u32 count() const {
        if constexpr (FORMAT_BITS<VALUE> == 16) return VALUE ? HEAD_DIM : HEAD_DIM / 2;
        return ((slot / RUN * BLOCKS + BLOCKS - 1) / PLANES - first_load() + 1) * PER_LOAD;
    }

    // Unit i of them: lane 4 g + c of a load and register r. The slot fixes some of these numbers. Of halves it is a
    // pair of channels of the slot, or a pair of slots of a channel.
    __device__ __forceinline__ u32 unit(u32 i) const {
        if constexpr (FORMAT_BITS<VALUE> == 16) {
            if (VALUE) return slot / 16 * (8 * HEAD_DIM) + i / 8 * 64 + slot % 16 / 8 * 32 + i % 8 * 4 + slot % 8 / 2;
            return slot / 8 * (4 * HEAD_DIM) + i / 4 * 32 + slot % 8 * 4 + i % 4;
        }
        const u32 load = first_load() + i / PER_LOAD;
        const u32 half = slot % 16 / 8;
        const u32 g = VALUE ? i % 8 : slot % 8;
        const u32 c = VALUE ? slot % 8 / 2 : i % 4;
        const u32 r = VALUE ? i / 8 % 2 + 2 * half : half + 2 * (i / 4 % 2);
        return load * 128 + (4 * g + c) * 4 + r;
    }
};

// Writes the bits in `mask` of a word. Whole bytes are written directly.
__device__ __forceinline__ void put_bits(u32* word, u32 packed, u32 mask) {
    if (mask == 0xffffffffu) {
        *word = packed;
        return;
    }
    u32 shared = 0u;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 touched = mask >> 8 * i & 0xffu;
        if (touched == 0xffu) {
            ((u8*)word)[i] = (u8)(packed >> 8 * i);
        } else {
            shared |= touched << 8 * i;
        }
    }
    if (shared != 0u) {
        const u32 flipped = (*(volatile u32*)word ^ packed) & shared;
        if (flipped != 0u) atomicXor(word, flipped);
    }
}

// Ranges that span tokens are already known: tile ranges lie with the tile, and `span_ranges` are those of the KV
// head's span.
template <bool VALUE>
__device__ __forceinline__ void put_row(u8* part, u32 slot, const float (&row)[LANE_CHANNELS], float shrink,
                                        const float2* span_ranges, StagedRow staged, int lane) {
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) staged.row[lane + 32 * i] = row[i];
    __syncwarp();
    if constexpr (CODED_ROWS<VALUE>) {
        const u32 word = code_row<VALUE>(staged.row, lane);
        if (lane == 0) ((u32*)(part + TILE_RANGES_AT<VALUE>))[slot] = word;
    } else if constexpr (TILE_RANGES<VALUE> && GROUP_TOKENS<VALUE> == 1) {
        for (u32 channel = 0; channel < TENSOR_CHANNELS; channel += GROUP_CHANNELS<VALUE>) {
            const auto at = [&](u32 i) { return staged.row[channel + i]; };
            const u32 word = warp_range<VALUE>(GROUP_ELEMENTS<VALUE>, lane, shrink, at);
            if (lane == 0) ((u32*)(part + TILE_RANGES_AT<VALUE>))[range_index<VALUE>(slot, channel)] = word;
        }
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        const u32 channel = lane + 32 * i;
        u32 field = 0u;
        if (channel < TENSOR_CHANNELS) {
            field = field_bits<VALUE>(staged.row[channel], element_range<VALUE>(part, span_ranges, slot, channel));
        }
        staged.fields[channel] = (u16)field;
    }
    __syncwarp();

    const SlotUnits<VALUE> units = {slot};
    u32* tile = (u32*)(part + TILE_AT<VALUE>);
    for (u32 i = lane; i < units.count(); i += 32) {
        const u32 unit = units.unit(i);
        Unit<VALUE> packed = Unit<VALUE>::zeros();
        Unit<VALUE> mask = Unit<VALUE>::zeros();
#pragma unroll
        for (u32 f = 0; f < FIELDS<VALUE>; f++) {
            const Field field = field_of<VALUE>(unit, f);
            if (field.token != slot) continue;
            packed.put(f, field.shift, staged.fields[field.channel]);
            mask.put(f, field.shift, FIELD_MASK<VALUE>);
        }
#pragma unroll
        for (u32 k = 0; k < UNIT_WORDS<VALUE>; k++) {
            put_bits(tile + Unit<VALUE>::word(unit, k), packed.words[k], mask.words[k]);
        }
    }
    __syncwarp();
}
