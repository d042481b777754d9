// The works of attend_run_pipelined.cu, and the warps that copy for them.
//
// A work is the rows of a part of an item, for one KV head. The tokens of the item pass through two rings of stages in
// shared memory, one of keys and one of values. The warpgroups that multiply and the thread that copies wait for each
// other at barriers: full after the bytes of a stage have arrived, empty after every warpgroup has read them.
//
// Other warps copy the item of the next work and its queries, while this work is multiplied. The place of queries is
// empty after their products with all keys have ended.

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
// Works whose queries have room (RunVariant::shared_bytes).
constexpr int QUERY_STAGES = HEAD_DIM > 128 ? 1 : 2;
constexpr u32 QUERY_STAGE_BYTES = GROUPS * GROUP_QUERY_BYTES;
// Warps that copy queries.
constexpr int QUERY_WARPS = 3;

// A work that a block has taken: its number, and its item. With PLACES places, a place is written again only after all
// warps have ended its work.
struct TakenWork {
    static constexpr int PLACES = 4;
    // In place of a number after the last work.
    static constexpr u32 NONE = 0xffffffffu;

    u32 number;
    Item item;
};

// Whether other warps copy the queries. Otherwise those that multiply load them.
__device__ __forceinline__ bool copies_queries(const AttendCall& call) {
    const bool aligned = (((u64)call.queries | call.query_stride * sizeof(u16)) & 15u) == 0u;
    return !ROTATION_DEALT<false> && call.query_type != ELEMENTS_F32 && aligned;
}

// Addresses of the barriers.
struct Pipeline {
    u32 keys_full;
    u32 values_full;
    u32 keys_empty;
    u32 values_empty;
    u32 work_full;
    u32 work_empty;
    u32 queries_full;

    static constexpr int BARRIERS = 4 * STAGES + 6;

    __device__ __forceinline__ explicit Pipeline(u32 barriers)
        : keys_full(barriers),
          values_full(barriers + 8 * STAGES),
          keys_empty(barriers + 16 * STAGES),
          values_empty(barriers + 24 * STAGES),
          work_full(barriers + 32 * STAGES),
          work_empty(barriers + 32 * STAGES + 16),
          queries_full(barriers + 32 * STAGES + 32) {}

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
            barrier_init(queries_full + 8 * i, QUERY_WARPS * 32);
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

    __device__ __forceinline__ Work(const AttendCall& call, u32 number) : Work(call, number, item_of(call, number)) {}

    // The same where the item was copied.
    __device__ __forceinline__ Work(const AttendCall& call, u32 number, const Item& item)
        : item(item),
          kv_head(call.first_head + number / (call.item_room * call.row_parts)),
          first(number % call.row_parts * (ROWS / call.group)) {
        const int queries = (int)item.queries;
        const int last = min((int)first + ROWS / (int)call.group, queries) - 1;
        const int tokens = min(max(item.seen + last, 1), (int)item.tokens);
        end_pass = (int)first < queries ? (tokens + RUN_TOKENS - 1) / RUN_TOKENS : 0;
        first_pass = MASKED == 0 ? 0 : min(max(item.from + (int)first, 0) / RUN_TOKENS, max(end_pass - 1, 0));
    }

    static __device__ __forceinline__ const Item& item_of(const AttendCall& call, u32 number) {
        return call.items[number % (call.item_room * call.row_parts) / call.row_parts];
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

// The thread that copies keys and values: takes works, and names them to the other warps. `counters` are the next work
// and the blocks that have ended.
__device__ __forceinline__ void copy_works(const AttendCall& call, const Pipeline& pipeline, u32 room, TakenWork* taken, u32 blocks) {
    u32* const counters = call.arrivals;
    const u32 count = Work::count(call);
    u32 keys = 0, values = 0;
    // The counter is asked one work ahead.
    u32 next = atomicAdd(counters, 1u);
#pragma unroll 1
    for (u32 round = 0;; round++) {
        const u32 number = next;
        barrier_wait(pipeline.work_empty + 8 * (round % 2), round / 2 & 1 ^ 1);
        taken[round % TakenWork::PLACES].number = number < count ? number : TakenWork::NONE;
        barrier_arrive(pipeline.work_full + 8 * (round % 2));
        if (number >= count) break;
        next = atomicAdd(counters, 1u);
        const Work work(call, number);
        if (work.end_pass > 0) copy_passes(call, pipeline, work, room, keys, values);
    }
    if (atomicInc(counters + 1, blocks - 1u) == blocks - 1u) counters[0] = 0u;
}

// Copies the queries of a work as they are, by one of QUERY_WARPS warps. Eight lanes have eight rows, and four of them
// 32 channels of a row.
__device__ __forceinline__ void copy_rows(const AttendCall& call, const Work& work, const PlacedRow* places, u32 queries,
                                          int warp, int lane) {
#pragma unroll 1
    for (int first = 8 * warp; first < ROWS; first += 8 * QUERY_WARPS) {
        const int row = first + lane % 8;
        const u16* const from = (const u16*)call.queries + query_offset(call, work.item, work.kv_head, work.first, places[row]);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++) {
            const int chunk = 4 * i + lane / 8;
            copy_16_async_or_zeros(queries + chunk_place(row, chunk), from + 8 * chunk, 8 * chunk < TENSOR_CHANNELS);
        }
    }
}

// The warps that copy the items of works, and queries.
__device__ __forceinline__ void copy_queries(const AttendCall& call, const Pipeline& pipeline, u32 room, TakenWork* taken,
                                             const PlacedRow* places, int warp, int lane) {
    const bool copies = copies_queries(call);
#pragma unroll 1
    for (u32 round = 0;; round++) {
        const u32 half = round % 2;
        barrier_wait(pipeline.work_full + 8 * half, round / 2 & 1);
        TakenWork& work = taken[round % TakenWork::PLACES];
        const u32 number = work.number;
        if (number != TakenWork::NONE) {
            const Item& item = Work::item_of(call, number);
            constexpr int words = sizeof(Item) / sizeof(u32);
            if (warp == 0 && lane < words) {
                copy_4_async_or_zeros(shared_address(&work.item) + 4 * lane, (const u32*)&item + lane, true);
            }
            // The table has room for items that the step does not have. They name no query to copy.
            if (copies && item.queries > 0) {
                // With one place, the queries of the work before must have been read.
                if (QUERY_STAGES == 1 && round > 0) barrier_wait(pipeline.work_empty + 8 * (1 - half), (round - 1) / 2 & 1);
                const u32 stage = round % QUERY_STAGES * QUERY_STAGE_BYTES;
                copy_rows(call, Work(call, number, item), places, room + QUERIES_AT + stage, warp, lane);
            }
        }
        arrive_after_copies(pipeline.queries_full + 8 * half);
        if (number == TakenWork::NONE) return;
    }
}
