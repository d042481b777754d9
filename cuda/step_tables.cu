// step_tables: brings the tables of a step, which arrive in one copy, to where the launches of its parts read them.
//
// A job is a copy, or the pages of a segment:
//
// address = the layer's shard + page · bytes of a page, marked if the step stores something in the page
//
// All layers of a part have the same pages in stores of their own. A step's pages are therefore written once, as words,
// and this kernel computes every layer's addresses. y is the job and z the layer. A thread owns rows of 16 bytes of a
// copy, or pages of a layer.
//
// In bounds: what jobs read and write was checked on the host, as were shards of a word. Words beyond the step's pages
// name one of its pages.

#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/step_call.cuh"

struct TableJob {
    // Rows of 16 bytes; or words: mark · 2^31 + shard · 2^27 + page within it.
    const void* from;
    // As many rows; or addresses, [layer][count].
    void* to;
    // [layer][MOST_STEP_SHARDS]; 0 for a copy.
    const u64* shards;
    u64 page_bytes;
    u32 count;
    // One for a copy.
    u32 layers;
};

extern "C" __global__ void __launch_bounds__(256) step_tables(const TableJob* jobs) {
    const TableJob job = jobs[blockIdx.y];
    const u32 layer = blockIdx.z;
    if (layer >= job.layers) return;
    const u64* shards = job.shards + layer * MOST_STEP_SHARDS;
    u64* addresses = (u64*)job.to + (u64)layer * job.count;
    for (u32 index = blockIdx.x * 256u + threadIdx.x; index < job.count; index += gridDim.x * 256u) {
        if (job.shards == nullptr) {
            ((uint4*)job.to)[index] = ((const uint4*)job.from)[index];
            continue;
        }
        const u32 word = ((const u32*)job.from)[index];
        const u64 address = shards[word >> 27 & 15u] + (u64)(word & 0x7ffffffu) * job.page_bytes;
        addresses[index] = word >> 31 == 0u ? address : address | FRESH_PAGE;
    }
}
