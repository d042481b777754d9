// The ring of stages of one warp, or of a team of ROW_WARPS warps: keys, values and ranges of the steps in flight.
//
// With BULK_COPIES (compute capability 9.0) lane 0 lets the copy engine fetch whole parts of a tile, whose arrival in
// shared memory a barrier signals. Otherwise every lane copies 16 bytes of each load: of codes those that it will
// read. If only extremes of scores are needed, values are not copied. The first warp of a team fills the ring. The last
// one that has read a stage loads it again.

#pragma once

#include "common/calibration.cuh"

static_assert(HEAD_BYTES % LINE_BYTES == 0, "parts of a page must begin at a line");
static_assert(ROW_WARPS == 1 || BULK_COPIES, "lanes copy what they read themselves");

// Ranges and matrices of halves are read by other lanes than those that copied them.
constexpr bool SHARED_BY_LANES = KEY_TILE_RANGES || VALUE_TILE_RANGES || KEY_BITS == 16 || VALUE_BITS == 16;

struct Ring {
    // Address of the first stage in shared memory.
    u32 stages;
    // Address of the first stage's barrier.
    u32 barriers;
    // For each stage, the warps of the team that have read it, where there are several.
    u32* readers;
    int lane;

    __device__ __forceinline__ u32 stage(int index) const { return stages + index * STAGE_BYTES; }

    __device__ __forceinline__ void start() const {
        if (BULK_COPIES && lane == 0) {
            for (int i = 0; i < STAGES; i++) barrier_init(barriers + 8 * i);
            if (ROW_WARPS > 1) {
                for (int i = 0; i < STAGES; i++) readers[i] = 0u;
            }
            shared_visible();
        }
        if (BULK_COPIES) __syncwarp();
    }

    // Starts loading step `step` of an item, whose page is given.
    __device__ __forceinline__ void issue(int index, u64 page, int step) const {
        const u32 to = stage(index);
        const int part = step % STEPS_PER_TILE;
        const u8* tile = (const u8*)page;
        const u8* keys = tile + part * (KEY_LOADS * LOAD_BYTES);
        const u8* values = tile + VALUES_AT + part * (VALUE_LOADS * LOAD_BYTES);
        const u8* key_tops = tile + TOPS_AT + part * (KEY_TOPS * LOAD_BYTES);
        const u8* value_tops = tile + VALUES_AT + TOPS_AT + part * (VALUE_TOPS * LOAD_BYTES);
        const u8* key_ranges = tile + KEY_RANGES_AT + ranges_at<KEY_GROUP_TOKENS, KEY_GROUP_CHANNELS>(part);
        const u8* value_ranges = tile + VALUE_RANGES_AT + ranges_at<VALUE_GROUP_TOKENS, VALUE_GROUP_CHANNELS>(part);
        if constexpr (BULK_COPIES) {
            if (lane == 0) {
                const u32 barrier = barriers + 8 * index;
                barrier_expect(barrier, FINDS_EXTREMES ? STAGE_VALUES_AT + STAGE_VALUE_RANGES_AT - STAGE_KEY_RANGES_AT
                                                       : STAGE_COPIED_BYTES);
                // A whole tile has the same layout in the page and in the stage.
                if (STEPS_PER_TILE == 1 && !FINDS_EXTREMES) {
                    copy_bulk(to, tile, STAGE_COPIED_BYTES, barrier);
                    return;
                }
                const auto copy_ranges = [&](u32 to_rows, const u8* from, u32 rows, u32 row_bytes) {
                    for (u32 row = 0; row < rows; row++) {
                        copy_bulk(to_rows + row * row_bytes, from + row * RANGE_ROW_STRIDE, row_bytes, barrier);
                    }
                };
                copy_bulk(to, keys, KEY_LOADS * LOAD_BYTES, barrier);
                if (KEY_TOPS > 0) copy_bulk(to + STAGE_KEY_TOPS_AT, key_tops, KEY_TOPS * LOAD_BYTES, barrier);
                copy_ranges(to + STAGE_KEY_RANGES_AT, key_ranges, KEY_RANGE_ROWS, KEY_RANGE_ROW_BYTES);
                if (FINDS_EXTREMES) return;
                copy_bulk(to + STAGE_VALUES_AT, values, VALUE_LOADS * LOAD_BYTES, barrier);
                if (VALUE_TOPS > 0) copy_bulk(to + STAGE_VALUE_TOPS_AT, value_tops, VALUE_TOPS * LOAD_BYTES, barrier);
                copy_ranges(to + STAGE_VALUE_RANGES_AT, value_ranges, VALUE_RANGE_ROWS, VALUE_RANGE_ROW_BYTES);
            }
        } else {
            const u32 at = lane * 16;
#pragma unroll
            for (int i = 0; i < KEY_LOADS; i++) copy_16_async(to + i * LOAD_BYTES + at, keys + i * LOAD_BYTES + at);
#pragma unroll
            for (int i = 0; i < KEY_TOPS; i++) {
                copy_16_async(to + STAGE_KEY_TOPS_AT + i * LOAD_BYTES + at, key_tops + i * LOAD_BYTES + at);
            }
            const auto copy_ranges = [&](u32 to_rows, const u8* from, u32 rows, u32 row_bytes) {
                for (u32 i = lane; i < rows * row_bytes / 16; i += 32) {
                    const u32 row = 16 * i / row_bytes;
                    copy_16_async(to_rows + 16 * i, from + row * RANGE_ROW_STRIDE + (16 * i - row * row_bytes));
                }
            };
            copy_ranges(to + STAGE_KEY_RANGES_AT, key_ranges, KEY_RANGE_ROWS, KEY_RANGE_ROW_BYTES);
            if (FINDS_EXTREMES) return;
#pragma unroll
            for (int i = 0; i < VALUE_LOADS; i++) {
                copy_16_async(to + STAGE_VALUES_AT + i * LOAD_BYTES + at, values + i * LOAD_BYTES + at);
            }
#pragma unroll
            for (int i = 0; i < VALUE_TOPS; i++) {
                copy_16_async(to + STAGE_VALUE_TOPS_AT + i * LOAD_BYTES + at, value_tops + i * LOAD_BYTES + at);
            }
            copy_ranges(to + STAGE_VALUE_RANGES_AT, value_ranges, VALUE_RANGE_ROWS, VALUE_RANGE_ROW_BYTES);
        }
    }

    // Closes the group of copies issued since the last call, even if there are none.
    __device__ __forceinline__ void commit() const {
        if (!BULK_COPIES) copies_commit();
    }

    // Waits for the oldest of STAGES steps. `turn` counts how often the stage was used before.
    __device__ __forceinline__ void wait(int index, u32 turn) const {
        if constexpr (BULK_COPIES) {
            barrier_wait(barriers + 8 * index, turn & 1u);
        } else {
            copies_wait<STAGES - 1>();
            if (SHARED_BY_LANES) __syncwarp();
        }
    }

    // All lanes have read the stage. Whether this warp is the one that loads it again.
    __device__ __forceinline__ bool release(int index) const {
        if (BULK_COPIES || SHARED_BY_LANES) __syncwarp();
        if constexpr (ROW_WARPS == 1) return true;
        u32 before = 0u;
        if (lane == 0) {
            __threadfence_block();
            before = atomicInc(readers + index, ROW_WARPS - 1u);
            __threadfence_block();
        }
        return __shfl_sync(ALL_LANES, before, 0) == ROW_WARPS - 1u;
    }
};
