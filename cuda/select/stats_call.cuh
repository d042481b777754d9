// Arguments of the kernels that measure attention, and the rows they read.
//
// A block owns a part: PART_TILES tiles of WARP_ROWS keys of one KV head. Its warps take one tile each, in turn. The
// keys of a tile stay in registers while the query rows of the head's group stream through. The rows of all heads form
// one list of groups of eight ("eights"); each head is padded with rows that do not exist. A chunk is the `staged`
// eights that are in shared memory at once. If a chunk holds all rows, they are staged once, and after that the warps
// of a block no longer wait for each other.

#pragma once

#include "select/key_tile.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

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
    // Tiles of a part.
    u32 part_tiles;
    // Eights of a chunk, a multiple of AT_ONCE.
    u32 staged;
    // Places of log-sum-exps, and of the sums of a head, in elements.
    u32 lse_row_stride;
    u32 lse_head_stride;
    u32 sum_stride;
    u32 unused;
    float scale;
    float log_threshold;
};

// The query rows of a KV head's group.
struct PassingRows {
    u32 kv_head;
    // Eights of a head, and of all heads of the group.
    u32 of_head;
    u32 eights;
    // All of them are one chunk.
    bool at_once;

    __device__ __forceinline__ PassingRows(const StatsCall& call, u32 kv_head)
        : kv_head(kv_head), of_head((call.rows + 7) / 8), eights(call.group * of_head), at_once(eights <= call.staged) {}
};

// A row of the list: row `of_eight` of a group of eight.
struct PassingRow {
    u32 query_head;
    u32 row;
    bool exists;

    __device__ __forceinline__ PassingRow(const StatsCall& call, const PassingRows& rows, u32 eight, u32 of_eight) {
        query_head = rows.kv_head * call.group + eight / rows.of_head;
        row = eight % rows.of_head * 8 + of_eight;
        exists = eight < rows.eights && row < call.rows;
    }

    // The place of its log-sum-exp.
    __device__ __forceinline__ u64 lse_at(const StatsCall& call) const {
        return (u64)query_head * call.lse_head_stride + (u64)row * call.lse_row_stride;
    }

    // The place of its statistics in [query_head][row].
    __device__ __forceinline__ u64 at(const StatsCall& call) const { return (u64)query_head * call.rows + row; }
};

// The number of keys that a row sees, from the first on.
__device__ __forceinline__ u32 seen_by(const StatsCall& call, u32 row) {
    return min(((const u32*)call.positions)[row] + 1, call.tokens);
}

// Makes the tile's keys resident, and prefetches those of the warp's next tile into the L2 cache.
__device__ __forceinline__ void load_keys(Resident& resident, const StatsCall& call, u32 first_key, u32 kv_head,
                                          u32 lane) {
    const void* keys = (const void*)call.keys;
    const u64 head = kv_head * call.key_head_stride;
#pragma unroll
    for (u32 m = 0; m < M_TILES; m++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 key = first_key + 16 * m + 8 * half + lane / 4;
            load_resident_row(resident, m, half, keys, key * call.key_token_stride + head, key < call.tokens, lane);
        }
    }
    constexpr u32 BYTES = KEY_TYPE == ELEMENTS_F32 ? 4 : 2;
    constexpr u32 LINES = (HEAD_DIM * BYTES + 127) / 128;
#pragma unroll
    for (u32 i = lane; i < WARP_ROWS * LINES; i += 32) {
        const u32 key = first_key + WARPS * WARP_ROWS + i / LINES;
        if (key < call.tokens) {
            prefetch_l2((const u8*)keys + (key * call.key_token_stride + head) * BYTES + i % LINES * 128);
        }
    }
}

// Loads of a tile's keys in flight to registers, for f16 keys in rows that begin at multiples of 16 bytes.
struct ArrivingKeys {
    uint4 loads[M_TILES][2][PAIRS];
};

// Loads the keys, starting at `first_key`. Keys from `end` on are zeros.
__device__ __forceinline__ void ask_for_keys(ArrivingKeys& arriving, const StatsCall& call, u32 first_key, u32 end,
                                             u32 kv_head, u32 lane) {
#pragma unroll
    for (u32 m = 0; m < M_TILES; m++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 key = first_key + 16 * m + 8 * half + lane / 4;
            const u16* row = (const u16*)call.keys + key * call.key_token_stride + kv_head * call.key_head_stride;
#pragma unroll
            for (u32 p = 0; p < PAIRS; p++) {
                const u32 channel = 32 * p + 8 * (lane % 4);
                const bool exists = key < end && channel < HEAD_DIM;
                arriving.loads[m][half][p] = exists ? *(const uint4*)(row + channel) : make_uint4(0, 0, 0, 0);
            }
        }
    }
}

// Makes the loaded keys resident.
__device__ __forceinline__ void take_keys(Resident& resident, const ArrivingKeys& arriving) {
#pragma unroll
    for (u32 i = 0; i < 2 * M_TILES * PAIRS; i++) {
        const u32 m = i / (2 * PAIRS), half = i / PAIRS % 2, p = i % PAIRS;
        set_resident(resident.high[m], p, half, arriving.loads[m][half][p]);
    }
}

// Whether no row of the chunk at `eight` sees a key from `first_key` on. Returns false for a chunk of several heads.
__device__ __forceinline__ bool chunk_is_blind(const StatsCall& call, const PassingRows& rows, u32 eight, u32 first_key) {
    const u32 last = min(eight + call.staged, rows.eights) - 1;
    if (eight / rows.of_head != last / rows.of_head) return false;
    return seen_by(call, min(last % rows.of_head * 8 + 7, call.rows - 1)) <= first_key;
}

// Stages the chunk that begins at eight `chunk`, and the number of keys that its rows see. All threads of the block
// call. Rows that do not exist are zeros and see everything. Calls note(index, row) for every row of the chunk. The
// rows may arrive later.
template <class Note>
__device__ __forceinline__ void stage_chunk(uint4* staged, u32* seen, const StatsCall& call, const PassingRows& rows,
                                            u32 chunk, const Note& note) {
    const u32 lane = threadIdx.x % 32;
    for (u32 eight = threadIdx.x / 32; eight < call.staged; eight += WARPS) {
        const PassingRow row(call, rows, chunk + eight, lane / 4);
        const u64 start = row.row * call.query_token_stride + row.query_head * call.query_head_stride;
#pragma unroll
        for (u32 p = 0; p < PAIRS; p++) {
            stage_passing(staged + eight * EIGHT_LOADS, p, (const void*)call.queries, start, row.exists, lane);
        }
        if (lane % 4 == 0) {
            const u32 index = 8 * eight + lane / 4;
            seen[index] = row.exists ? seen_by(call, row.row) : call.tokens;
            note(index, row);
        }
    }
    copies_commit();
}

// Whether every staged row sees all keys below `end`.
__device__ __forceinline__ bool all_see(const u32* seen, u32 rows, u32 end, u32 lane) {
    bool see = true;
    for (u32 i = lane; i < rows; i += 32) see &= seen[i] >= end;
    return __all_sync(ALL_LANES, see);
}
