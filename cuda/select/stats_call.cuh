// What the kernels that measure attention are called with, and the rows they read.

#pragma once

#include "select/key_tile.cuh"

struct StatsCall {
    u64 keys;
    u64 key_token_stride;
    u64 key_head_stride;
    u64 queries;
    u64 query_token_stride;
    u64 query_head_stride;
    // Positions of the query rows, ascending.
    u64 positions;
    // (max, sum) as [part][query_head][row].
    u64 row_partials;
    u64 row_lse;
    u64 row_max;
    u64 column_sums;
    // [part][query_head][row].
    u64 count_partials;
    u32 tokens;
    // Query rows of a head.
    u32 rows;
    u32 kv_heads;
    // Query heads of a KV head.
    u32 group;
    // Tiles of keys of a part.
    u32 part_tiles;
    float scale;
    float log_threshold;
    u32 unused;
};

// The warp's keys of a tile become resident.
__device__ __forceinline__ void load_keys(Resident& resident, const StatsCall& call, u32 first_key, u32 kv_head,
                                          u32 lane) {
#pragma unroll
    for (u32 m = 0; m < M_TILES; m++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 key = first_key + 16 * m + 8 * half + lane / 4;
            const u64 start = key * call.key_token_stride + kv_head * call.key_head_stride;
            load_resident_row(resident, m, half, (const void*)call.keys, start, key < call.tokens, lane);
        }
    }
}

// Query rows from `first` on are staged, by all threads of the block; those that do not exist are zeros.
__device__ __forceinline__ void stage_queries(StagedRows& staged, const StatsCall& call, u32 first, u32 query_head) {
    for (u32 i = threadIdx.x; i < STAGED * (HEAD_DIM / 4); i += blockDim.x) {
        const u32 row = i / (HEAD_DIM / 4);
        const u64 start = (first + row) * call.query_token_stride + query_head * call.query_head_stride;
        stage_four(staged, row, i % (HEAD_DIM / 4), (const void*)call.queries, start, first + row < call.rows);
    }
}

// The largest key that a query row sees, as a count of keys; 0 of rows that do not exist.
__device__ __forceinline__ u32 seen_by(const StatsCall& call, u32 row) {
    return row < call.rows ? min(((const u32*)call.positions)[row] + 1, call.tokens) : 0;
}
