// Storing the token of a step within `attend`, by the block whose item ends with its page.
//
// The last two warps store its key and its value. Other warps do not wait for them, but for two barriers: `prepared`,
// before queries are read, at which every warp arrives before it stores anything; and `stored`, before the page that is
// written is loaded. A block that stores nothing does not use the latter.

#pragma once

#include "common/append_row.cuh"

// A launch of `attend` that stores. The section of the table has an entry for every query, in their order.
struct StoringCall {
    AttendCall attend;
    WriteCall writes;
};

struct StoredRows {
    float rows[2][HEAD_DIM];
    u16 fields[2][HEAD_DIM];
    u64 prepared;
    u64 stored;
};

// The last two warps store the key and the value of a token. It is not inlined: other warps need the registers.
__device__ __noinline__ void store_token(const WriteCall& writes, uint4 entry, u32 kv_head, StoredRows& shared,
                                         int which, int lane) {
    const StagedRow staged = {shared.rows[which], shared.fields[which]};
    if (which == 0) {
        append_row<false>(writes, entry, kv_head, staged, lane);
    } else {
        append_row<true>(writes, entry, kv_head, staged, lane);
    }
    global_visible_to_copies();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.stored));
}

// Before a barrier of the block.
__device__ __forceinline__ void start_storing(StoredRows& shared) {
    if (threadIdx.x != 0) return;
    barrier_init(shared_address(&shared.prepared), WARPS);
    barrier_init(shared_address(&shared.stored), 2u);
}
