// copy_page: copies pages within their store: tiles and their ranges.
//
// Threads take 16 bytes in turns; neighbours take neighbouring bytes.
//
// With programmatic serialisation, blocks begin while the previous kernel still runs, and wait for it.
//
// In bounds: indices stay below the entries of the section · the 16 bytes of a page; pages were checked on the host
// when the table was made for the layout that the store was bound to.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/step_call.cuh"

extern "C" __global__ void copy_page(const WriteCall call) {
    admit_later_kernels();
    await_earlier_kernels();
    const u32 page_pieces = call.kv_heads * (HEAD_BYTES / 16);
    const u64 total = (u64)entry_count(call) * page_pieces;
    const u64 threads = (u64)gridDim.x * blockDim.x;
    for (u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x; index < total; index += threads) {
        const uint4 entry = entry_at(call, (u32)(index / page_pieces));
        const u32 piece = (u32)(index % page_pieces);
        const uint4* from = (const uint4*)page_part(call, entry.w & 0xffffu, entry.x, 0);
        uint4* to = (uint4*)page_part(call, entry.w >> 16, entry.y, 0);
        to[piece] = from[piece];
    }
}
