// The ring of stages of one block: tiles of a head in their page layout (keys, values and tile ranges).
//
// With BULK_COPIES (compute capability 9.0) one thread lets the copy engine fetch a tile, whose arrival in shared
// memory a barrier signals. Otherwise all threads copy 16 bytes at a time. Tiles are counted within the item. Tiles
// beyond it are not copied.

#pragma once

#include "common/ptx.cuh"
#include "common/attend_call.cuh"

static_assert(HEAD_BYTES % 16 == 0, "tiles are copied 16 bytes at a time");

struct TileRing {
    // Addresses of the first stage, and of its barrier, in shared memory.
    u32 stages;
    u32 barriers;
    const u64* pages;
    // Offset of the head's part in a page.
    u64 head_at;
    int tiles;

    __device__ __forceinline__ u32 stage(int tile) const { return stages + tile % STAGES * STAGE_BYTES; }

    // Called before a barrier of the block.
    __device__ __forceinline__ void start() const {
        if (BULK_COPIES && threadIdx.x == 0) {
            for (int i = 0; i < STAGES; i++) barrier_init(barriers + 8 * i);
            shared_visible();
        }
    }

    // Starts loading a tile, by all threads of the block. None of them still reads its stage.
    __device__ __forceinline__ void issue(int tile) const {
        if (tile < tiles) {
            const u8* from = (const u8*)(pages[tile] + head_at);
            const u32 to = stage(tile);
            if (BULK_COPIES && threadIdx.x == 0) {
                const u32 barrier = barriers + 8 * (tile % STAGES);
                barrier_expect(barrier, HEAD_BYTES);
                copy_bulk_shared(to, from, HEAD_BYTES, barrier);
            }
            if (!BULK_COPIES) {
                for (u32 at = 16 * threadIdx.x; at < HEAD_BYTES; at += 16 * WARPS * 32) copy_16_async(to + at, from + at);
            }
        }
        if (!BULK_COPIES) copies_commit();
    }

    // Waits for a tile of the item, by all threads of the block: the oldest one that is in flight.
    __device__ __forceinline__ void wait(int tile) const {
        if constexpr (BULK_COPIES) {
            barrier_wait(barriers + 8 * (tile % STAGES), tile / STAGES & 1);
        } else {
            copies_wait<STAGES - 1>();
            __syncthreads();
        }
    }
};
