// A tile of the product of many rows, and a slot of its ring: what linear_tiles.cu and tile_sums.cuh have in common.

#pragma once

#include "codes.cuh"
#include "shared_memory.cuh"

struct TilesCall {
    // The activations as the copy engine reads them.
    alignas(64) u64 map[16];
    u64 codes;
    u64 scales;
    u64 units;
    u64 outputs;
    // Sums of the blocks of a tile, and how many blocks have come to each part of it.
    u64 partial;
    u64 came;
    u32 rows;
};

constexpr u32 STEPS = (CHUNKS + 3) / 4;
constexpr u32 ALL_STEPS = STEPS * PARTS;
constexpr u32 OUTPUT_TILE = 128;
constexpr u32 COLUMNS = (OUTPUTS + OUTPUT_TILE - 1) / OUTPUT_TILE;

constexpr u32 CONSUMERS = 256;
constexpr u32 CONSUMER_WARPS = CONSUMERS / 32;
constexpr u32 PRODUCERS = 128;
constexpr u32 TILE_STRIPS = OUTPUT_TILE / 16;

// A slot: two blocks of 64 inputs of the activations, and of each 16 outputs the codes `[n][chunk]` and the scales:
// `[n]` in strips and else `[n][chunk]`.
constexpr u32 X_BLOCK = ROW_TILE * 128;
constexpr u32 CODES_AT = 2 * X_BLOCK;
constexpr u32 CHUNK_BYTES = 4 * BITS;
constexpr u32 STRIP_CODES = 64 * CHUNK_BYTES;
constexpr u32 SCALE_BYTES = SINGLE_SCALES ? 8 : 4;
constexpr u32 STRIP_SCALES = (IN_STRIPS ? 16 : 64) * SCALE_BYTES;
constexpr u32 SCALES_AT = CODES_AT + TILE_STRIPS * STRIP_CODES;
constexpr u32 SLOT = (SCALES_AT + TILE_STRIPS * STRIP_SCALES + 1023) / 1024 * 1024;
constexpr u32 BARRIERS_AT = SLOTS * SLOT;

// Whether chunk t of a step has the octets t, t + 4, t + 8 and t + 12, as `octet_at` says.
constexpr bool EVERY_FOURTH = GROUP_CHUNKS % 4 == 0 && BITS != 8;
// Octets of a chunk that are multiplied together: with neighbouring octets, two of them make 16 inputs.
constexpr u32 TOGETHER = EVERY_FOURTH ? 1 : 2;

// Eights of rows of a tile.
constexpr u32 EIGHTS = ROW_TILE / 8;

// Whether the blocks of a tile are a cluster.
constexpr bool EXCHANGES = SPLIT == 2;

// The part of a tile that an eight of rows belongs to: whole pairs of eights.
__device__ __forceinline__ constexpr u32 part_of(u32 eight) { return eight / 2 * SPLIT / (EIGHTS / 2); }

// The word of each of four lanes to the lane whose number it has: a transposition.
__device__ __forceinline__ uint4 transposed(uint4 x, u32 lane) {
    constexpr u32 ALL = 0xffffffffu;
    const bool odd = lane % 2, high = lane / 2 % 2;
    const u32 a = __shfl_xor_sync(ALL, odd ? x.x : x.y, 1), b = __shfl_xor_sync(ALL, odd ? x.z : x.w, 1);
    if (odd) x.x = a, x.z = b;
    else x.y = a, x.w = b;
    const u32 c = __shfl_xor_sync(ALL, high ? x.x : x.z, 2), d = __shfl_xor_sync(ALL, high ? x.y : x.w, 2);
    if (high) x.x = c, x.y = d;
    else x.z = c, x.w = d;
    return x;
}

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
