// append: stores the tokens of a step in slots of open pages, as f16 or as codes whose ranges belong to single tokens.
//
// One warp owns a token of one KV head: a key in the first row of blocks, a value in the second. It reads the row,
// rotates it if the format does, computes and stores its ranges, and then writes the bytes of the tile that belong to
// it (common/put_row.cuh). Rows are read coalesced. Elements that cannot be stored count as 0, and the token is
// flagged. Where the store has centres, the centre of the sequence is subtracted from keys before they are rotated.
//
// With programmatic serialisation, blocks read their entries while the previous kernel still runs. Kernels admitted
// after that have to wait only for the tokens themselves.
//
// In bounds: warps beyond the entries of the section return; tokens, pages and slots were checked on the host when the
// table was made for the layout that stores and tensors were bound to, and no slot is named twice.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/step_call.cuh"
#include "common/put_row.cuh"

constexpr int APPEND_WARPS = 8;

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

extern "C" __global__ void append(const WriteCall call) {
    __shared__ float rows[APPEND_WARPS][HEAD_DIM];
    __shared__ u16 fields[APPEND_WARPS][HEAD_DIM];
    const u32 warp = threadIdx.x / 32;
    const u32 index = blockIdx.x * APPEND_WARPS + warp;
    // Both loads run concurrently.
    const u32 count = entry_count(call);
    const uint4 entry = entry_at(call, min(index / call.kv_heads, call.capacity - 1u));
    // The entries were written before the step was launched. Blocks without work wait too, because later kernels wait
    // for this one.
    await_earlier_kernels();
    admit_later_kernels();
    if (index / call.kv_heads >= count) return;
    const u32 kv_head = index % call.kv_heads;
    const StagedRow staged = {rows[warp], fields[warp]};
    if (blockIdx.y == 0) {
        append_row<false>(call, entry, kv_head, staged, threadIdx.x % 32);
    } else {
        append_row<true>(call, entry, kv_head, staged, threadIdx.x % 32);
    }
}
