// append: single tokens of a dense tensor into slots of f16 pages.
//
// One thread owns one element; neighbours own neighbouring channels of a row. Every half of a tile belongs to one token,
// so that no write touches what another owns.
//
// In bounds: threads beyond the last token return; tokens, pages and slots were checked on the host, and no slot is
// named twice.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/rows.cuh"

// Inverse of `field_of` for f16: the half of a tile that holds an element.
template <bool VALUE>
__device__ __forceinline__ u32 half_of(u32 slot, u32 channel) {
    if constexpr (VALUE) {
        const u32 load = slot / 16 * VALUE_BLOCKS + channel / 16;
        const u32 r = (channel % 16) / 8 + 2 * ((slot % 16) / 8);
        return ((load * 32 + 4 * (channel % 8) + (slot % 8) / 2) * 4 + r) * 2 + slot % 2;
    } else {
        const u32 load = slot / 16 * KEY_BLOCKS + channel / 16;
        const u32 r = (slot % 16) / 8 + 2 * ((channel % 16) / 8);
        return ((load * 32 + 4 * (slot % 8) + (channel % 8) / 2) * 4 + r) * 2 + channel % 2;
    }
}

template <bool VALUE>
__device__ __forceinline__ void append_element(const RowsCall& call) {
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u32 channel = (u32)(index % HEAD_DIM);
    const u32 kv_head = (u32)(index / HEAD_DIM % call.kv_heads);
    const u64 write = index / HEAD_DIM / call.kv_heads;
    if (write >= call.tokens) return;
    const TokenPlace place = ((const TokenPlace*)call.pages)[write];
    u16* tile = (u16*)(place.page + (u64)kv_head * HEAD_BYTES + TILE_AT<VALUE>);
    tile[half_of<VALUE>(place.slot, channel)] = (u16)half_bits(element(call, place.token, kv_head, channel));
}

extern "C" __global__ void append_keys(const RowsCall call) { append_element<false>(call); }

extern "C" __global__ void append_values(const RowsCall call) { append_element<true>(call); }
