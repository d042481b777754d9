// append: stores the tokens of a step in slots of open pages, as f16 or as codes whose ranges belong to single tokens.
//
// One warp owns a token of one KV head: a key in the first row of blocks, a value in the second
// (common/append_row.cuh). Rows are read coalesced. Where a step decodes a token of each sequence, `attend` may store
// the tokens instead.
//
// With programmatic serialisation, blocks read their entries while the previous kernel still runs. Kernels admitted
// after that have to wait only for the tokens themselves.
//
// In bounds: warps beyond the entries of the section return; tokens, pages and slots were checked on the host when the
// table was made for the layout that stores and tensors were bound to, and no slot is named twice.

#pragma once

#include "common/append_row.cuh"

constexpr int APPEND_WARPS = 8;

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
