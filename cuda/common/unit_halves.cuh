// Halves of packed tiles in the shared memory of a block of attend_run.cu: units of tokens, which all warps unpack
// together and then multiply, and the room of the block.
//
// Keys: loads [16 tokens][16 channels], as common/tile.cuh has them. Values: [16 tokens][16 channels].

#pragma once

#include "common/tile_halves.cuh"

// Tokens that are unpacked together. With WARPGROUPS a warpgroup multiplies 64 of them at a time, and TOKEN_PARTS
// warpgroups share their rows. Otherwise blocks have more rows, whose queries need the room.
constexpr int UNIT_TOKENS = WARPGROUPS ? 64 * TOKEN_PARTS : TILE_TOKENS;
constexpr int TILE_UNITS = TILE_TOKENS / UNIT_TOKENS;
// Keys and values of one unit.
constexpr u32 HALVES_BYTES = 2 * UNIT_TOKENS * HEAD_DIM * 2;
// Two units of halves precede the ring. With WARPGROUPS the queries lie between them and the ring, otherwise in the
// place of the second unit, or in the last stage.
constexpr u32 GROUP_QUERY_BYTES = WARPGROUPS ? WARPS * 16 / TOKEN_PARTS * HEAD_DIM * 2 : 0;
constexpr u32 RING_AT = UNPACKS ? 2 * HALVES_BYTES + GROUP_QUERY_BYTES : 0;
constexpr bool RING_HOLDS_QUERIES = !UNPACKS;
constexpr u32 QUERIES_AT = WARPGROUPS ? 2 * HALVES_BYTES : UNPACKS ? HALVES_BYTES : (STAGES - 1) * STAGE_BYTES;
constexpr u32 QUERY_ROOM = WARPGROUPS ? GROUP_QUERY_BYTES : UNPACKS ? HALVES_BYTES : STAGE_BYTES;

// Stores an A fragment as two B fragments: for lanes that read theirs, or as matrices for warpgroups.
__device__ __forceinline__ void store_fragments(u32 to, const u32 (&words)[4], int lane) {
#if WARPGROUPS
    store_matrices(to + lane * 16, words[0], words[2], words[1], words[3]);
#else
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + lane * 16), "r"(words[0]), "r"(words[2]), "r"(words[1]),
                 "r"(words[3])
                 : "memory");
#endif
}

// Two B fragments of eight tokens of keys, or of eight channels of values, each.
struct FragmentPair {
    u32 first[2];
    u32 second[2];
};

// Of 16 tokens, which begin at `from`, those of step f of the channels.
template <bool VALUE>
__device__ __forceinline__ FragmentPair load_fragments(u32 from, int f, int lane) {
    if constexpr (UNPACKS) {
        const uint4 words = load_shared_16(from + f * LOAD_BYTES + lane * 16);
        return {{words.x, words.y}, {words.z, words.w}};
    } else {
        const uint4 words = VALUE ? load_value_halves(from, f, lane) : load_key_halves(from, f, lane);
        return {{words.x, words.z}, {words.y, words.w}};
    }
}

// A unit in shared memory. `m` counts blocks of 16 tokens within the tile.
struct UnitHalves {
    static constexpr int UNROLLED = 1;
    static constexpr bool KEEPS_BITS = false;

    u32 keys;

    __device__ __forceinline__ void put_keys(int m, int f, const u32 (&words)[4], int lane) const {
        constexpr int steps = UNIT_TOKENS / BLOCK_TOKENS;
        store_fragments(keys + (WARPGROUPS ? f * steps + m % steps : m * CHANNEL_STEPS + f) * LOAD_BYTES, words, lane);
    }

    __device__ __forceinline__ void put_values(int m, int n, const u32 (&words)[4], int lane) const {
        const u32 values = keys + HALVES_BYTES / 2;
        store_fragments(values + (m % (UNIT_TOKENS / BLOCK_TOKENS) * CHANNEL_STEPS + n) * LOAD_BYTES, words, lane);
    }
};

// Unpacks unit `unit` of the tile in stage `stage` to halves at `to`, with all warps of the block.
__device__ __forceinline__ void unpack_unit(u32 to, u32 stage, int unit, int warp, int lane) {
    constexpr int steps = UNIT_TOKENS / BLOCK_TOKENS;
    constexpr int runs = UNIT_TOKENS / 32;
    static_assert(WARPS % steps == 0 && WARPS % runs == 0, "a warp stays with its tokens");
    const UnitHalves halves = {to};
    const KeyBlocks blocks = {warp / steps, WARPS / steps};
    unpack_keys(halves, stage, stage + KEY_RANGES_AT, unit * steps + warp % steps, blocks, lane);
    unpack_values(halves, stage + VALUES_AT, stage + VALUE_RANGES_AT, unit * runs + warp % runs, warp / runs,
                  WARPS / runs, lane);
    // The tensor cores read the halves asynchronously.
    if (WARPGROUPS) shared_visible();
}
