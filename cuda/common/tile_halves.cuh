// Packed tiles as halves in the order of f16 tiles, for kernels that read a tile often.
//
//   ranges of the tile:      half = minimum + scale · code, rounded once (scales and minimums are halves)
//   ranges of the span:      half = code − CENTRE, exactly; scales and minimums are for the reader
//   levels of a codebook:    half = norm · (step + ½) / 128, rounded once (norms are halves); units are for the reader
//
// Keys: loads [16 tokens][16 channels], as common/tile.cuh has them, where channel 4 c + e of 16 is element 2 c + (e >>
// 1) of an MMA, in the upper half for odd e; queries are in the same order (`channel_place`). Values:
// [16 tokens][16 channels].
//
// The warps of a block take blocks of 16 tokens of keys, and blocks of 32 tokens by 16 channels of values, in turn. A
// pair of elements takes a shift, a mask that also places the codes into the mantissas of 1024 + code, a subtraction
// and a multiply-add.

#pragma once

#include "common/pairs.cuh"
#include "common/attend_call.cuh"
#include "common/level_bytes.cuh"

// False if tiles are read directly: f16 tiles are multiplied in place.
constexpr bool UNPACKS = KEY_BITS != 16 || VALUE_BITS != 16;
// Steps of 16 channels, which one MMA multiplies.
constexpr int CHANNEL_STEPS = HEAD_DIM / 16;
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

// The code that counts as 0 in products.
constexpr float KEY_CENTRE = KEY_BITS == 16 ? 0.0f : (float)(1 << (KEY_BITS % 16 - (KEY_BITS < 16)));
constexpr float VALUE_CENTRE = VALUE_BITS == 16 ? 0.0f : (float)(1 << (VALUE_BITS % 16 - (VALUE_BITS < 16)));

// The place of channel c of 16 in a fragment: the lane's column, the pair of words, and the half.
struct ChannelPlace {
    int column;
    int second;
    int high;
};

__device__ __forceinline__ ChannelPlace channel_place(int c) {
    if (KEY_BITS == 16) return {c / 2 % 4, c / 8, c % 2};
    return {c / 4, c % 2, c / 2 % 2};
}

// The half 1024, twice. Adding a code below 1024 to its bits adds the code to the half.
constexpr u32 CODE_START = 0x64006400u;

// Codes in the low bits of halves as halves, minus `centre`.
__device__ __forceinline__ u32 code_halves(u32 codes, u32 centre) {
    return multiply_subtract_pair(codes | CODE_START, 0x3c003c00u, CODE_START + centre * 0x00010001u);
}

// Whether codes stand for levels, or for the two levels of 1 bit, which are −½ and ½.
constexpr bool KEY_CODEBOOK = KEY_LEVEL_UNIT != 0;
constexpr bool VALUE_CODEBOOK = VALUE_LEVEL_UNIT != 0;

// The factor of halves of a codebook.
__device__ __forceinline__ float halves_unit(u32 level_unit) {
    return level_unit == 0 ? 1.0f : 128.0f * __uint_as_float(level_unit);
}

// The levels of one plane of a word's codes as signed bytes: a level is (byte + ½) · unit.
template <int BITS>
__device__ __forceinline__ u32 plane_levels(u32 word, int plane) {
    if constexpr (BITS == 4) {
        const u32 tables[LEVEL_TABLES] = {level_table(0), level_table(1), level_table(2), level_table(3)};
        const u32 low_bits = word & 0x77777777u;
        const u32 first = level_bytes_4<0>(word, low_bits, word << 4, tables);
        const u32 second = level_bytes_4<1>(word, low_bits, word << 4, tables);
        return permute_bytes(first, second, plane == 0 ? 0x6420u : 0x7531u);
    } else if constexpr (BITS == 3) {
        return three_bit_levels(word);
    } else {
        const u32 selector = word >> (2 * (plane % 2)) & 0x33333333u;
        const u32 first = permute_bytes(level_table(4), 0u, selector);
        const u32 second = permute_bytes(level_table(4), 0u, selector >> 16);
        return permute_bytes(first, second, plane < 2 ? 0x6420u : 0x7531u);
    }
}

// (byte + ½) / 128 of the signed bytes in the low bits of halves, exactly.
__device__ __forceinline__ u32 level_halves(u32 bytes) {
    const u32 above = bytes & 0x00ff00ffu ^ 0x00800080u;
    // The half 4 + (2 b + 1) / 256, minus 5.
    return multiply_subtract_pair(2u * above + 0x44014401u, 0x3c003c00u, 0x45004500u);
}

// [`level_halves`] for codes of 1 bit.
__device__ __forceinline__ u32 sign_halves(u32 codes) { return level_halves(codes + 0x00ff00ffu); }

// Two ranges as a pair of scales and one of minimums.
struct RangePair {
    u32 scales;
    u32 minimums;
};

__device__ __forceinline__ RangePair range_pair(u32 first, u32 second) {
    return {permute_bytes(first, second, 0x5410u), permute_bytes(first, second, 0x7632u)};
}

// Ranges of two channels, `channel` and the one after the next, of a token.
__device__ __forceinline__ RangePair key_range_pair(u32 ranges, int token, int channel) {
    if constexpr (KEY_GROUP_CHANNELS == 1) {
        const u32 at = ranges + 4 * (token / (KEY_GROUP_TOKENS + !KEY_GROUP_TOKENS) * HEAD_DIM + channel);
        return range_pair(load_shared_4(at), load_shared_4(at + 8));
    } else {
        constexpr int channels = KEY_GROUP_CHANNELS + !KEY_GROUP_CHANNELS;
        const u32 word = load_shared_4(ranges + 4 * (channel / channels * TILE_TOKENS + token));
        if (channels % 4 == 0) return range_pair(word, word);
        return range_pair(word, load_shared_4(ranges + 4 * ((channel + 2) / channels * TILE_TOKENS + token)));
    }
}

// Ranges of two neighbouring tokens of a channel, the first of them even.
__device__ __forceinline__ RangePair value_range_pair(u32 ranges, int token, int channel) {
    if constexpr (VALUE_GROUP_CHANNELS == 1) {
        static_assert(VALUE_GROUP_CHANNELS != 1 || VALUE_GROUP_TOKENS % 2 == 0, "neighbours share a range");
        const u32 row = token / (VALUE_GROUP_TOKENS + !VALUE_GROUP_TOKENS) * HEAD_DIM;
        const u32 word = load_shared_4(ranges + 4 * (row + channel));
        return range_pair(word, word);
    } else {
        constexpr int channels = VALUE_GROUP_CHANNELS + !VALUE_GROUP_CHANNELS;
        const uint2 words = load_shared_8(ranges + 4 * (channel / channels * TILE_TOKENS + token));
        return range_pair(words.x, words.y);
    }
}

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

// The place of 16 tokens by 16 channels of keys in a unit. `m` counts within the tile.
__device__ __forceinline__ u32 keys_at(int m, int f) {
    constexpr int steps = UNIT_TOKENS / BLOCK_TOKENS;
    return (WARPGROUPS ? f * steps + m % steps : m * CHANNEL_STEPS + f) * LOAD_BYTES;
}

// Unpacks keys of 16 tokens, every `step`-th block of channels from `first` on. Loads of keys are at `from`.
__device__ __forceinline__ void unpack_keys(u32 to, u32 from, u32 ranges, int m, int first, int step, int lane) {
    if constexpr (KEY_BITS == 16) {
#pragma unroll 1
        for (int f = first; f < CHANNEL_STEPS; f += step) {
            const uint4 load = load_key_halves(from + m * (CHANNEL_STEPS * LOAD_BYTES), f, lane);
            const u32 words[4] = {load.x, load.y, load.z, load.w};
            store_fragments(to + keys_at(m, f), words, lane);
        }
        return;
    }
    from += lane * 16;
    const int g = lane >> 2;
    const int c = lane & 3;
    RangePair of_tokens[2];
    if constexpr (KEY_TOKEN_RANGES) {
        of_tokens[0] = key_range_pair(ranges, 16 * m + g, 0);
        of_tokens[1] = key_range_pair(ranges, 16 * m + g + 8, 0);
    }
#pragma unroll 1
    for (int f = first; f < KEY_BLOCKS; f += step) {
        const int block = m * KEY_BLOCKS + f;
        const uint4 load = load_shared_16(from + block / KEY_PLANES * LOAD_BYTES);
        uint4 top = load;
        if (KEY_BITS == 3) top = load_shared_16(from + TOPS_AT + block / TOP_PLANES * LOAD_BYTES);
        u32 levels[4] = {load.x, load.y, load.z, load.w};
        if constexpr (KEY_LEVELS) {
            if (KEY_BITS == 3) three_bit_block(levels, load, top, block);
#pragma unroll
            for (int r = 0; r < 4; r++) levels[r] = plane_levels<KEY_BITS>(levels[r], block % KEY_PLANES);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 words[4];
            key_pairs(words, load, top, block, half, true);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                if constexpr (KEY_LEVELS) {
                    words[r] = multiply_pair(level_halves(levels[2 * half + r % 2] >> 8 * (r / 2)), of_tokens[r % 2].scales);
                } else if constexpr (KEY_CODEBOOK) {
                    words[r] = multiply_pair(sign_halves(words[r]), of_tokens[r % 2].scales);
                } else if constexpr (KEY_SPAN_RANGES) {
                    words[r] = code_halves(words[r], (u32)KEY_CENTRE);
                } else {
                    const int channel = 32 * f + 16 * half + 4 * c + r / 2;
                    const RangePair range = KEY_TOKEN_RANGES ? of_tokens[r % 2]
                                                             : key_range_pair(ranges, 16 * m + 8 * (r % 2) + g, channel);
                    words[r] = multiply_add_pair(code_halves(words[r], 0u), range.scales, range.minimums);
                }
            }
            store_fragments(to + keys_at(m, 2 * f + half), words, lane);
        }
    }
}

// The place of 16 tokens by 16 channels of values in a unit. `m` counts within the tile.
__device__ __forceinline__ u32 values_at(int m, int n) {
    return (m % (UNIT_TOKENS / BLOCK_TOKENS) * CHANNEL_STEPS + n) * LOAD_BYTES;
}

// Unpacks values of 32 tokens, every `step`-th block of 16 channels from `first` on. Loads of values are at `from`.
__device__ __forceinline__ void unpack_values(u32 to, u32 from, u32 ranges, int run, int first, int step, int lane) {
    const int g = lane >> 2;
    const int c = lane & 3;
    const auto token = [&](int half, int r) { return 32 * run + 16 * half + 8 * (r / 2) + 2 * c; };
    RangePair of_tokens[2][2];
    if constexpr (VALUE_TOKEN_RANGES) {
#pragma unroll
        for (int i = 0; i < 4; i++) of_tokens[i / 2][i % 2] = value_range_pair(ranges, token(i / 2, 2 * (i % 2)), 0);
    }
#pragma unroll 1
    for (int n = first; n < VALUE_BLOCKS; n += step) {
        if constexpr (VALUE_BITS == 16) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 load = load_value_halves(from + (2 * run + half) * (VALUE_BLOCKS * LOAD_BYTES), n, lane);
                const u32 words[4] = {load.x, load.y, load.z, load.w};
                store_fragments(to + values_at(2 * run + half, n), words, lane);
            }
            continue;
        }
        const int block = run * VALUE_BLOCKS + n;
        const uint4 load = load_shared_16(from + block / VALUE_PLANES * LOAD_BYTES + lane * 16);
        u32 packed[4] = {load.x, load.y, load.z, load.w};
        if constexpr (VALUE_BITS == 3) {
            const uint4 top = load_shared_16(from + TOPS_AT + block / TOP_PLANES * LOAD_BYTES + lane * 16);
            three_bit_block(packed, load, top, block);
        }
        const int shift = VALUE_BITS == 3 || VALUE_LEVELS ? 0 : VALUE_BITS * (block % VALUE_PLANES);
        if constexpr (VALUE_LEVELS) {
#pragma unroll
            for (int r = 0; r < 4; r++) packed[r] = plane_levels<VALUE_BITS>(packed[r], block % VALUE_PLANES);
        }
        constexpr u32 mask = ((1u << (VALUE_BITS % 16)) - 1u) * 0x00010001u;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 words[4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const u32 codes = packed[r] >> (8 * half + shift) & mask;
                if constexpr (VALUE_LEVELS) {
                    words[r] = multiply_pair(level_halves(packed[r] >> 8 * half), of_tokens[half][r / 2].scales);
                } else if constexpr (VALUE_CODEBOOK) {
                    words[r] = multiply_pair(sign_halves(codes), of_tokens[half][r / 2].scales);
                } else if constexpr (VALUE_SPAN_RANGES) {
                    words[r] = code_halves(codes, (u32)VALUE_CENTRE);
                } else {
                    const int channel = 16 * n + 8 * (r % 2) + g;
                    const RangePair range = VALUE_TOKEN_RANGES ? of_tokens[half][r / 2]
                                                               : value_range_pair(ranges, token(half, r), channel);
                    words[r] = multiply_add_pair(code_halves(codes, 0u), range.scales, range.minimums);
                }
            }
            store_fragments(to + values_at(2 * run + half, n), words, lane);
        }
    }
}

// Unpacks unit `unit` of the tile in stage `stage` to halves at `to`, with all warps of the block.
__device__ __forceinline__ void unpack_unit(u32 to, u32 stage, int unit, int warp, int lane) {
    constexpr int steps = UNIT_TOKENS / BLOCK_TOKENS;
    constexpr int runs = UNIT_TOKENS / 32;
    static_assert(WARPS % steps == 0 && WARPS % runs == 0, "a warp stays with its tokens");
    unpack_keys(to, stage, stage + KEY_RANGES_AT, unit * steps + warp % steps, warp / steps, WARPS / steps, lane);
    unpack_values(to + HALVES_BYTES / 2, stage + VALUES_AT, stage + VALUE_RANGES_AT, unit * runs + warp % runs, warp / runs,
                  WARPS / runs, lane);
    // The tensor cores read the halves asynchronously.
    if (WARPGROUPS) shared_visible();
}
