// The works of attend_run_pipelined.cu, and the warp that copies their keys and values.
//
// A work is the rows of a part of an item, for one KV head. The tokens of the item pass through two rings of stages in
// shared memory, one of keys and one of values. The warpgroups that multiply and the thread that copies wait for each
// other at barriers: full after the bytes of a stage have arrived, empty after every warpgroup has read them.

#pragma once

#include "common/attend_call.cuh"
#include "common/calibration.cuh"
#include "common/halves.cuh"
#include "common/run_rows.cuh"

constexpr int GROUPS = WARPS / 4;
// Tokens of a pass: those whose products fit the registers next to the outputs.
constexpr int RUN_TOKENS = HEAD_DIM > 128 ? 64 : 128;
constexpr int PASS_STEPS = RUN_TOKENS / BLOCK_TOKENS;
constexpr int TILE_PASSES = TILE_TOKENS / RUN_TOKENS;
constexpr u32 PASS_BYTES = RUN_TOKENS * HEAD_DIM * 2;
constexpr u32 PASS_VALUES_AT = STAGES * PASS_BYTES;
constexpr u32 QUERIES_AT = 2 * STAGES * PASS_BYTES;

// Addresses of the barriers.
struct Pipeline {
    u32 keys_full;
    u32 values_full;
    u32 keys_empty;
    u32 values_empty;
    u32 work_full;
    u32 work_empty;

    static constexpr int BARRIERS = 4 * STAGES + 4;

    __device__ __forceinline__ explicit Pipeline(u32 barriers)
        : keys_full(barriers),
          values_full(barriers + 8 * STAGES),
          keys_empty(barriers + 16 * STAGES),
          values_empty(barriers + 24 * STAGES),
          work_full(barriers + 32 * STAGES),
          work_empty(barriers + 32 * STAGES + 16) {}

    // By one thread, before a barrier of the block.
    __device__ __forceinline__ void start() const {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(keys_full + 8 * i);
            barrier_init(values_full + 8 * i);
            barrier_init(keys_empty + 8 * i, GROUPS);
            barrier_init(values_empty + 8 * i, GROUPS);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(work_full + 8 * i);
            barrier_init(work_empty + 8 * i, GROUPS);
        }
        shared_visible();
    }
};

// Rows of an item for one KV head.
struct Work {
    const Item& item;
    u32 kv_head;
    // The first query of the part.
    u32 first;
    // Its passes over the tokens of the item. None if the item has no such rows.
    int first_pass;
    int end_pass;

    __device__ __forceinline__ Work(const AttendCall& call, u32 number)
        : item(call.items[number % (call.item_room * call.row_parts) / call.row_parts]),
          kv_head(call.first_head + number / (call.item_room * call.row_parts)),
          first(number % call.row_parts * (ROWS / call.group)) {
        const int queries = (int)item.queries;
        const int last = min((int)first + ROWS / (int)call.group, queries) - 1;
        const int tokens = min(max(item.seen + last, 1), (int)item.tokens);
        end_pass = (int)first < queries ? (tokens + RUN_TOKENS - 1) / RUN_TOKENS : 0;
        first_pass = MASKED == 0 ? 0 : min(max(item.from + (int)first, 0) / RUN_TOKENS, max(end_pass - 1, 0));
    }

    static __device__ __forceinline__ u32 count(const AttendCall& call) {
        return call.item_room * call.row_parts * call.section_heads;
    }

    // One after the last token that a query sees, and the first one.
    __device__ __forceinline__ int limit(u32 query) const {
        return min(max(item.seen + (int)min(first + query, item.queries - 1u), 0), (int)item.tokens);
    }

    __device__ __forceinline__ int start(u32 query) const {
        return MASKED == 0 ? 0 : max(item.from + (int)min(first + query, item.queries - 1u), 0);
    }
};

// Copies the passes of a work, the last first. The products with values are one pass behind those with keys. `keys` and
// `values` count the copies of the block.
__device__ __forceinline__ void copy_passes(const AttendCall& call, const Pipeline& pipeline, const Work& work, u32 room,
                                            u32& keys, u32& values) {
    const u64* const pages = call.pages + work.item.first_page;
    const u64 head_at = (u64)work.kv_head * HEAD_BYTES;
    const u32 of_section = work.kv_head - call.first_head;
    const auto tile_at = [&](u32 tile) {
        if (!UNPACKS) return (const u8*)(pages[tile] + head_at);
        const u64 place = (u64)(work.item.first_page + tile) * call.section_heads + of_section;
        return (const u8*)call.halves + place * (2 * TILE_HALVES_BYTES);
    };
    const auto pass_at = [&](int pass) { return tile_at(pass / TILE_PASSES) + pass % TILE_PASSES * PASS_BYTES; };
    const auto copy = [&](u32 to, const u8* from, u32 full, u32 empty, u32& count) {
        const u32 stage = count % STAGES;
        barrier_wait(empty + 8 * stage, count / STAGES & 1 ^ 1);
        barrier_expect(full + 8 * stage, PASS_BYTES);
        copy_bulk_shared(to + stage * PASS_BYTES, from, PASS_BYTES, full + 8 * stage);
        count++;
    };
#pragma unroll 1
    for (int pass = work.end_pass - 1; pass >= work.first_pass - !FINDS_EXTREMES; pass--) {
        if (pass >= work.first_pass) copy(room, pass_at(pass), pipeline.keys_full, pipeline.keys_empty, keys);
        if (!FINDS_EXTREMES && pass + 1 < work.end_pass) {
            copy(room + PASS_VALUES_AT, pass_at(pass + 1) + TILE_HALVES_BYTES, pipeline.values_full, pipeline.values_empty, values);
        }
    }
}

// The thread that copies: takes works, names them to the other warps, and fetches their keys and values. `counters` are
// the next work and the blocks that have ended.
__device__ __forceinline__ void copy_works(const AttendCall& call, const Pipeline& pipeline, u32 room, u32* works, u32 blocks) {
    u32* const counters = call.arrivals;
    const u32 count = Work::count(call);
    u32 keys = 0, values = 0;
    // The counter is asked one work ahead.
    u32 next = atomicAdd(counters, 1u);
#pragma unroll 1
    for (u32 round = 0;; round++) {
        const u32 number = next;
        barrier_wait(pipeline.work_empty + 8 * (round % 2), round / 2 & 1 ^ 1);
        works[round % 2] = number;
        barrier_arrive(pipeline.work_full + 8 * (round % 2));
        if (number >= count) break;
        next = atomicAdd(counters, 1u);
        const Work work(call, number);
        if (work.end_pass > 0) copy_passes(call, pipeline, work, room, keys, values);
    }
    if (atomicInc(counters + 1, blocks - 1u) == blocks - 1u) counters[0] = 0u;
}
