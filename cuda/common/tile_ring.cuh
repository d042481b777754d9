// The ring of stages of one block: whole tiles of a head in their page layout (keys, values and tile ranges), or pieces
// of them, with keys and values of the same tokens.
//
// With BULK_COPIES (compute capability 9.0) one thread lets the copy engine fetch a tile, whose arrival in shared
// memory a barrier signals. Otherwise all threads copy 16 bytes at a time. Pieces are counted within the item. Pieces
// beyond it are not copied.

#pragma once

#include "common/ptx.cuh"
#include "common/attend_call.cuh"

static_assert(HEAD_BYTES % 16 == 0, "tiles are copied 16 bytes at a time");

static_assert(TILE_PIECES == 1 || (BULK_COPIES && KEY_RANGES_AT == HEAD_BYTES), "pieces have no ranges");
constexpr int PIECE_TOKENS = TILE_TOKENS / TILE_PIECES;
constexpr u32 PIECE_BYTES = STAGE_BYTES / TILE_PIECES;

struct TileRing {
    // Addresses of the first stage, and of its barrier, in shared memory.
    u32 stages;
    u32 barriers;
    const u64* pages;
    // Offset of the head's part in a page.
    u64 head_at;
    int pieces;

    __device__ __forceinline__ u32 stage(int piece) const { return stages + piece % STAGES * PIECE_BYTES; }

    // Called before a barrier of the block.
    __device__ __forceinline__ void start() const {
        if (BULK_COPIES && threadIdx.x == 0) {
            for (int i = 0; i < STAGES; i++) barrier_init(barriers + 8 * i);
            shared_visible();
        }
    }

    // Starts loading a piece, by all threads of the block. None of them still reads its stage.
    __device__ __forceinline__ void issue(int piece) const {
        if (piece < pieces) {
            const u8* from = (const u8*)(pages[piece / TILE_PIECES] + head_at);
            const u32 to = stage(piece);
            if (BULK_COPIES && threadIdx.x == 0) {
                const u32 barrier = barriers + 8 * (piece % STAGES);
                barrier_expect(barrier, HEAD_BYTES / TILE_PIECES);
                if (TILE_PIECES == 1) {
                    copy_bulk(to, from, HEAD_BYTES, barrier);
                } else {
                    constexpr u32 keys = KEY_TILE_BYTES / TILE_PIECES, values = VALUE_TILE_BYTES / TILE_PIECES;
                    copy_bulk(to, from + piece % TILE_PIECES * keys, keys, barrier);
                    copy_bulk(to + keys, from + VALUES_AT + piece % TILE_PIECES * values, values, barrier);
                }
            }
            if (!BULK_COPIES) {
                for (u32 at = 16 * threadIdx.x; at < HEAD_BYTES; at += 16 * WARPS * 32) copy_16_async(to + at, from + at);
            }
        }
        if (!BULK_COPIES) copies_commit();
    }

    // Waits for a piece of the item, by all threads of the block: the oldest one that is in flight.
    __device__ __forceinline__ void wait(int piece) const {
        if constexpr (BULK_COPIES) {
            barrier_wait(barriers + 8 * (piece % STAGES), piece / STAGES & 1);
        } else {
            copies_wait<STAGES - 1>();
            __syncthreads();
        }
    }
};
