// A warp stores a row of a step: reads it, rotates it if the format does, computes and stores its ranges, and writes
// the bytes of the tile that belong to it (common/put_row.cuh). Elements that cannot be stored count as 0, and the token
// is flagged. Where the store has centres, the centre of the sequence is subtracted from keys before they are rotated.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/step_call.cuh"
#include "common/put_row.cuh"

// Only formats that store single tokens get here: f16, or ranges that do not span tokens.
template <bool VALUE>
__device__ __forceinline__ void append_row(const WriteCall& call, uint4 entry, u32 kv_head, StagedRow staged, int lane) {
    const void* rows = VALUE ? call.values : call.keys;
    const u32 type = VALUE ? call.value_type : call.key_type;
    const float largest = VALUE ? call.value_largest : call.key_largest;
    const u64 first = (u64)entry.x * call.token_stride + (u64)kv_head * call.head_stride;
    float row[LANE_CHANNELS];
    bool storable = true;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        const u32 channel = lane + 32 * i;
        const float x = channel < TENSOR_CHANNELS ? load_element(rows, type, first + channel) : 0.0f;
        // False for NaN.
        const bool in_order = fabsf(x) <= largest;
        row[i] = in_order ? x : 0.0f;
        storable = storable && in_order;
        if constexpr (KEY_CENTRED && !VALUE) {
            const u64 centre = ((u64)centre_slot(entry) * call.kv_heads + kv_head) * TENSOR_CHANNELS;
            if (channel < TENSOR_CHANNELS) row[i] = __fsub_rn(row[i], call.centres[centre + channel]);
        }
    }
    if (!storable) atomicMin(call.flags + VALUE, entry.x);
    rotate<VALUE>(row, lane);
    u8* part = page_part(call, entry.w, entry.y, kv_head);
    put_row<VALUE>(part, token_slot(entry), row, VALUE ? call.value_shrink : call.key_shrink, nullptr, staged, lane);
}
