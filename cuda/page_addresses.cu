// page_addresses: computes the addresses of the pages of a segment, for all layers of a model at once.
//
// address = the layer's shard + page · bytes of a page, marked if the step stores something in the page
//
// All layers have the same pages in stores of their own. A step's pages are therefore written once, as words, and this
// kernel computes every layer's addresses. A thread owns one page of one layer: x is the page, y the layer.
//
// In bounds: there are `capacity` words, and as many addresses for every layer; shards of a word were checked on the
// host. Words beyond the step's pages are zeros or those of an earlier step, and nobody reads their addresses.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/step_call.cuh"

struct PagesCall {
    // mark · 2^31 + shard · 2^27 + page within it.
    const u32* pages;
    // [layer][MOST_STEP_SHARDS]
    const u64* shards;
    // [layer][capacity]
    u64* addresses;
    u64 page_bytes;
    u32 capacity;
    u32 unused;
};

extern "C" __global__ void __launch_bounds__(256) page_addresses(const PagesCall call) {
    const u32 index = blockIdx.x * 256u + threadIdx.x;
    const u32 layer = blockIdx.y;
    if (index >= call.capacity) return;
    const u32 word = call.pages[index];
    const u64 shard = call.shards[layer * MOST_STEP_SHARDS + (word >> 27 & 15u)];
    const u64 address = shard + (u64)(word & 0x7ffffffu) * call.page_bytes;
    call.addresses[(u64)layer * call.capacity + index] = word >> 31 == 0u ? address : address | FRESH_PAGE;
}
