// The ring of stages of one warp: keys, values and ranges of the steps that are on their way.
//
// With BULK_COPIES (compute capability 9.0) lane 0 asks the copy engine for whole parts of a tile, which arrive on a
// barrier in shared memory; otherwise every lane copies exactly the 16 bytes of each load that it will read. Where only
// extremes of scores are looked for, values stay where they are.

#pragma once

#include "common/calibration.cuh"

static_assert(HEAD_BYTES % LINE_BYTES == 0, "parts of a page must begin at a line");

struct Ring {
    // Address of the first stage in shared memory.
    u32 stages;
    // Address of the first stage's barrier.
    u32 barriers;
    int lane;

    __device__ __forceinline__ u32 stage(int index) const { return stages + index * STAGE_BYTES; }

    __device__ __forceinline__ void start() const {
        if (BULK_COPIES && lane == 0) {
            for (int i = 0; i < STAGES; i++) barrier_init(barriers + 8 * i);
            barriers_visible();
        }
        if (BULK_COPIES) __syncwarp();
    }

    // Asks for step `step` of an item whose page holds it.
    __device__ __forceinline__ void issue(int index, u64 page, int step) const {
        const u32 to = stage(index);
        const int part = step % STEPS_PER_TILE;
        const u8* tile = (const u8*)page;
        const u8* keys = tile + part * (KEY_LOADS * LOAD_BYTES);
        const u8* values = tile + VALUES_AT + part * (VALUE_LOADS * LOAD_BYTES);
        const u8* key_ranges = tile + KEY_RANGES_AT + part * (STEP_TOKENS * 4);
        const u8* value_ranges = tile + VALUE_RANGES_AT + part * (STEP_TOKENS * 4);
        if constexpr (BULK_COPIES) {
            if (lane == 0) {
                const u32 barrier = barriers + 8 * index;
                barrier_expect(barrier, FINDS_EXTREMES ? KEY_LOADS * LOAD_BYTES + STAGE_VALUE_RANGES_AT - STAGE_KEY_RANGES_AT
                                                       : STAGE_COPIED_BYTES);
                copy_bulk(to, keys, KEY_LOADS * LOAD_BYTES, barrier);
                if (KEY_TOKEN_RANGES) copy_bulk(to + STAGE_KEY_RANGES_AT, key_ranges, STEP_TOKENS * 4, barrier);
                if (FINDS_EXTREMES) return;
                copy_bulk(to + STAGE_VALUES_AT, values, VALUE_LOADS * LOAD_BYTES, barrier);
                if (VALUE_TOKEN_RANGES) copy_bulk(to + STAGE_VALUE_RANGES_AT, value_ranges, STEP_TOKENS * 4, barrier);
            }
        } else {
            const u32 at = lane * 16;
#pragma unroll
            for (int i = 0; i < KEY_LOADS; i++) copy_16_async(to + i * LOAD_BYTES + at, keys + i * LOAD_BYTES + at);
            if (KEY_TOKEN_RANGES && lane < STEP_TOKENS / 4) copy_16_async(to + STAGE_KEY_RANGES_AT + at, key_ranges + at);
            if (FINDS_EXTREMES) return;
#pragma unroll
            for (int i = 0; i < VALUE_LOADS; i++) {
                copy_16_async(to + STAGE_VALUES_AT + i * LOAD_BYTES + at, values + i * LOAD_BYTES + at);
            }
            if (VALUE_TOKEN_RANGES && lane < STEP_TOKENS / 4) {
                copy_16_async(to + STAGE_VALUE_RANGES_AT + at, value_ranges + at);
            }
        }
    }

    // Closes what was issued since the last call, be it nothing.
    __device__ __forceinline__ void commit() const {
        if (!BULK_COPIES) copies_commit();
    }

    // Waits for the oldest of STAGES steps; `turn` counts how often the stage was used before.
    __device__ __forceinline__ void wait(int index, u32 turn) const {
        if constexpr (BULK_COPIES) {
            barrier_wait(barriers + 8 * index, turn & 1u);
        } else {
            copies_wait<STAGES - 1>();
            // Ranges are read by other lanes than copied them.
            if (KEY_TOKEN_RANGES || VALUE_TOKEN_RANGES) __syncwarp();
        }
    }

    // All lanes have read the stage that is issued next.
    __device__ __forceinline__ void release() const {
        if (BULK_COPIES || KEY_TOKEN_RANGES || VALUE_TOKEN_RANGES) __syncwarp();
    }
};
