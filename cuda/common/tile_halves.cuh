// Unpacks packed tiles to halves (common/halves.cuh), for kernels that read a tile often.
//
// A target takes blocks of 16 tokens by 16 channels as A fragments: of keys, whose rows are tokens, `put_keys(m, f,
// words, lane)`, and of values, whose rows are channels, `put_values(m, n, words, lane)`. It says by UNROLLED how many
// blocks are unpacked without a loop, and by KEEPS_BITS whether codes stay the bits that they are (KEY_BITS_KEPT). In packed
// keys channel 4 c + e of 16 is element 2 c + (e >> 1) of an MMA, in the upper half for odd e; queries are in the same
// order (`channel_place`).
//
// Warps take blocks of 16 tokens of keys, and blocks of 32 tokens by 16 channels of values, in turn. A pair of elements
// takes a shift, a mask that also places the codes into the mantissas of 1024 + code, a subtraction and a multiply-add.
// Where bits are kept, a pair takes a mask, and every second pair of values takes a shift before it.

#pragma once

#include "common/pairs.cuh"
#include "common/attend_call.cuh"
#include "common/halves.cuh"
#include "common/level_bytes.cuh"

// The half 1024, twice. Adding a code below 1024 to its bits adds the code to the half.
constexpr u32 CODE_START = 0x64006400u;

// Codes, each times 2^shift in the low 10 bits of a half, as halves, minus `centre`: exactly.
__device__ __forceinline__ u32 code_halves(u32 codes, u32 centre, int shift) {
    const u32 one = 0x3c00u - (shift << 10);
    const u32 start = 0x6400u - (shift << 10) + (centre << shift);
    return multiply_subtract_pair(codes | CODE_START, one * 0x00010001u, start * 0x00010001u);
}

// Whether codes stand for levels, or for the two levels of 1 bit, which are −½ and ½.
constexpr bool KEY_CODEBOOK = KEY_LEVEL_UNIT != 0;
constexpr bool VALUE_CODEBOOK = VALUE_LEVEL_UNIT != 0;

// The tables of levels in registers: constants, or words of shared memory where bits are kept. The compiler would load
// constants before every use, and there the bytes have 128 added.
struct LevelWords {
    u32 tables[LEVEL_TABLES];

    template <bool KEPT, typename Halves>
    static __device__ __forceinline__ LevelWords of(const Halves& to) {
        LevelWords levels;
        u32(&tables)[LEVEL_TABLES] = levels.tables;
#pragma unroll
        for (int i = 0; i < LEVEL_TABLES; i++) tables[i] = level_table(i);
        if constexpr (KEPT) {
            const uint4 words = load_shared_16(to.level_tables);
            tables[0] = words.x;
            tables[1] = words.y;
            tables[2] = words.z;
            tables[3] = words.w;
            tables[4] = load_shared_4(to.level_tables + 16);
        }
        return levels;
    }
};

// The levels of one plane of a word's codes as signed bytes: a level is (byte + ½) · unit.
template <int BITS>
__device__ __forceinline__ u32 plane_levels(u32 word, int plane, const u32 (&tables)[LEVEL_TABLES]) {
    if constexpr (BITS == 4) {
        const u32 low_bits = word & 0x77777777u;
        const u32 first = level_bytes_4<0>(word, low_bits, word << 4, tables);
        const u32 second = level_bytes_4<1>(word, low_bits, word << 4, tables);
        return permute_bytes(first, second, plane == 0 ? 0x6420u : 0x7531u);
    } else if constexpr (BITS == 3) {
        return three_bit_levels(word);
    } else {
        const u32 selector = word >> (2 * (plane % 2)) & 0x33333333u;
        const u32 first = permute_bytes(tables[4], 0u, selector);
        const u32 second = permute_bytes(tables[4], 0u, selector >> 16);
        return permute_bytes(first, second, plane < 2 ? 0x6420u : 0x7531u);
    }
}

// (byte + ½) / 128 of the signed bytes in the low bits of halves, exactly.
__device__ __forceinline__ u32 level_halves(u32 bytes) {
    const u32 above = bytes & 0x00ff00ffu ^ 0x00800080u;
    // The half 4 + (2 b + 1) / 256, minus 5.
    return multiply_subtract_pair(2u * above + 0x44014401u, 0x3c003c00u, 0x45004500u);
}

// Bytes 0 and 2, or 1 and 3, of levels with 128 added, as the subnormal halves that they are. Those of 3 bits lack the
// 128; those of the tables of `kept_levels` have it.
template <int BITS>
__device__ __forceinline__ u32 level_bits(u32 bytes, int odd) {
    const u32 pair = permute_bytes(bytes, 0u, odd ? 0x4341u : 0x4240u);
    return BITS == 3 ? pair ^ 0x00800080u : pair;
}
constexpr u32 LEVELS_RAISED = 0x80808080u;

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

// Whether 16 tokens of a channel of keys have the same range, and 16 channels of a token of values.
constexpr bool KEY_BLOCKS_SHARE_RANGES = KEY_GROUP_CHANNELS == 1 && KEY_GROUP_TOKENS % 16 == 0;
constexpr bool VALUE_BLOCKS_SHARE_RANGES = VALUE_GROUP_CHANNELS > 1 && VALUE_GROUP_CHANNELS % 16 == 0 && !VALUE_TOKEN_RANGES;

// Blocks in which the channels of a token's keys are unpacked, and steps of 16 channels in a block.
constexpr int UNPACKED_KEY_BLOCKS = KEY_BITS == 16 ? CHANNEL_STEPS : KEY_BLOCKS;
constexpr int KEY_BLOCK_STEPS = CHANNEL_STEPS / UNPACKED_KEY_BLOCKS;

// Every `step`-th block of channels from `first` on, before `end`.
struct KeyBlocks {
    int first = 0;
    int step = 1;
    int end = UNPACKED_KEY_BLOCKS;
};

// Unpacks keys of 16 tokens. Loads of keys are at `from`.
template <typename Halves>
__device__ __forceinline__ void unpack_keys(const Halves& to, u32 from, u32 ranges, int m, KeyBlocks blocks, int lane) {
    if constexpr (KEY_BITS == 16) {
#pragma unroll Halves::UNROLLED
        for (int f = blocks.first; f < blocks.end; f += blocks.step) {
            const uint4 load = load_key_halves(from + m * (CHANNEL_STEPS * LOAD_BYTES), f, lane);
            const u32 words[4] = {load.x, load.y, load.z, load.w};
            to.put_keys(m, f, words, lane);
        }
        return;
    }
    from += lane * 16;
    const int g = lane >> 2;
    const int c = lane & 3;
    constexpr bool kept = Halves::KEEPS_BITS && KEY_BITS_KEPT;
    // The levels of all planes of a load are looked up together.
    constexpr bool levels_at_once = kept && KEY_LEVELS && KEY_BITS != 3 && KEY_BLOCKS % KEY_PLANES == 0;
    u32 of_planes[4][KEY_PLANES];
    const LevelWords levels_of = LevelWords::of<kept && KEY_LEVELS>(to);
    RangePair of_tokens[2];
    if constexpr (KEY_TOKEN_RANGES && !kept) {
        of_tokens[0] = key_range_pair(ranges, 16 * m + g, 0);
        of_tokens[1] = key_range_pair(ranges, 16 * m + g + 8, 0);
    }
#pragma unroll Halves::UNROLLED
    for (int f = blocks.first; f < blocks.end; f += blocks.step) {
        const int block = m * KEY_BLOCKS + f;
        if constexpr (levels_at_once) {
            if (f % KEY_PLANES == 0) {
                const uint4 load = load_shared_16(from + block / KEY_PLANES * LOAD_BYTES);
                level_bytes<KEY_BITS, false, true>(of_planes[0], load.x, levels_of.tables);
                level_bytes<KEY_BITS, false, true>(of_planes[1], load.y, levels_of.tables);
                level_bytes<KEY_BITS, false, true>(of_planes[2], load.z, levels_of.tables);
                level_bytes<KEY_BITS, false, true>(of_planes[3], load.w, levels_of.tables);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 words[4];
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    words[r] = level_bits<KEY_BITS>(of_planes[2 * half + r % 2][f % KEY_PLANES], r / 2);
                }
                to.put_keys(m, 2 * f + half, words, lane);
            }
            continue;
        }
        const uint4 load = load_shared_16(from + block / KEY_PLANES * LOAD_BYTES);
        uint4 top = load;
        if (KEY_BITS == 3) top = load_shared_16(from + TOPS_AT + block / TOP_PLANES * LOAD_BYTES);
        u32 levels[4] = {load.x, load.y, load.z, load.w};
        if constexpr (KEY_LEVELS) {
            if (KEY_BITS == 3) three_bit_block(levels, load, top, block);
#pragma unroll
            for (int r = 0; r < 4; r++) levels[r] = plane_levels<KEY_BITS>(levels[r], block % KEY_PLANES, levels_of.tables);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 words[4];
            // Codes stay where they are if their place is known.
            constexpr bool shifted = Halves::UNROLLED == 1 || KEY_CODEBOOK || kept && !KEY_PLACES_FIXED;
            const int shift = shifted || KEY_BITS == 3 ? 0 : KEY_PLANE_SHIFT * (block % KEY_PLANES % KEY_HALF_PLANES);
            key_pairs(words, load, top, block, half, shifted);
            RangePair of_channels[2];
            if constexpr (KEY_BLOCKS_SHARE_RANGES) {
                const u32 first = 16 * m / (KEY_GROUP_TOKENS + !KEY_GROUP_TOKENS) * HEAD_DIM + 32 * f + 16 * half + 4 * c;
                const uint4 of = load_shared_16(ranges + 4 * first);
                of_channels[0] = range_pair(of.x, of.z);
                of_channels[1] = range_pair(of.y, of.w);
            }
#pragma unroll
            for (int r = 0; r < 4; r++) {
                if constexpr (KEY_LEVELS && kept) {
                    words[r] = level_bits<KEY_BITS>(levels[2 * half + r % 2], r / 2);
                } else if constexpr (KEY_LEVELS) {
                    words[r] = multiply_pair(level_halves(levels[2 * half + r % 2] >> 8 * (r / 2)), of_tokens[r % 2].scales);
                } else if constexpr (KEY_CODEBOOK && !kept) {
                    words[r] = multiply_pair(sign_halves(words[r]), of_tokens[r % 2].scales);
                } else if constexpr (kept) {
                    // A mask has placed them.
                } else if constexpr (KEY_SPAN_RANGES) {
                    words[r] = code_halves(words[r], (u32)KEY_CENTRE, shift);
                } else {
                    const int channel = 32 * f + 16 * half + 4 * c + r / 2;
                    RangePair range = KEY_TOKEN_RANGES ? of_tokens[r % 2] : of_channels[r / 2];
                    if (!KEY_TOKEN_RANGES && !KEY_BLOCKS_SHARE_RANGES) {
                        range = key_range_pair(ranges, 16 * m + 8 * (r % 2) + g, channel);
                    }
                    words[r] = multiply_add_pair(code_halves(words[r], 0u, shift), range.scales, range.minimums);
                }
            }
            to.put_keys(m, 2 * f + half, words, lane);
        }
    }
}

// The ranges of a lane's pairs of tokens of a run of 32, where values have a range per token.
struct RunRanges {
    RangePair of_tokens[2][2];

    __device__ __forceinline__ RunRanges(u32 ranges, int run, int lane) {
        if constexpr (VALUE_TOKEN_RANGES && !VALUE_FOLDED) {
#pragma unroll
            for (int i = 0; i < 4; i++) of_tokens[i / 2][i % 2] = value_range_pair(ranges, token(run, i / 2, 2 * (i % 2), lane), 0);
        }
    }

    // The first token of word `r` of a half of a block.
    static __device__ __forceinline__ int token(int run, int half, int r, int lane) {
        return 32 * run + 16 * half + 8 * (r / 2) + 2 * (lane & 3);
    }
};

// Unpacks values of 32 tokens and 16 channels, block `n` of the channels. Loads of values are at `from`.
template <typename Halves>
__device__ __forceinline__ void unpack_value_block(const Halves& to, u32 from, u32 ranges, const RunRanges& of_run, int run, int n,
                                                   int lane) {
    if constexpr (VALUE_BITS == 16) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 load = load_value_halves(from + (2 * run + half) * (VALUE_BLOCKS * LOAD_BYTES), n, lane);
            const u32 words[4] = {load.x, load.y, load.z, load.w};
            to.put_values(2 * run + half, n, words, lane);
        }
        return;
    }
    constexpr bool kept = Halves::KEEPS_BITS && VALUE_BITS_KEPT;
    const int block = run * VALUE_BLOCKS + n;
    const uint4 load = load_shared_16(from + block / VALUE_PLANES * LOAD_BYTES + lane * 16);
    u32 packed[4] = {load.x, load.y, load.z, load.w};
    if constexpr (VALUE_BITS == 3) {
        const uint4 top = load_shared_16(from + TOPS_AT + block / TOP_PLANES * LOAD_BYTES + lane * 16);
        three_bit_block(packed, load, top, block);
    }
    const int shift = VALUE_BITS == 3 || VALUE_LEVELS ? 0 : VALUE_BITS * (block % VALUE_PLANES);
    if constexpr (VALUE_LEVELS) {
        const LevelWords levels_of = LevelWords::of<kept>(to);
#pragma unroll
        for (int r = 0; r < 4; r++) packed[r] = plane_levels<VALUE_BITS>(packed[r], block % VALUE_PLANES, levels_of.tables);
    }
    constexpr u32 mask = ((1u << (VALUE_BITS % 16)) - 1u) * 0x00010001u;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 words[4];
        RangePair of_tokens[2];
        if constexpr (VALUE_BLOCKS_SHARE_RANGES) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                of_tokens[i] = value_range_pair(ranges, RunRanges::token(run, half, 2 * i, lane), 16 * n);
            }
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const u32 codes = packed[r] >> 8 * half & mask << shift;
            if constexpr (VALUE_LEVELS && kept) {
                words[r] = level_bits<VALUE_BITS>(packed[r], half);
            } else if constexpr (VALUE_LEVELS) {
                words[r] = multiply_pair(level_halves(packed[r] >> 8 * half), of_run.of_tokens[half][r / 2].scales);
            } else if constexpr (VALUE_CODEBOOK && kept) {
                words[r] = codes >> shift;
            } else if constexpr (VALUE_CODEBOOK) {
                words[r] = multiply_pair(sign_halves(codes >> shift), of_run.of_tokens[half][r / 2].scales);
            } else if constexpr (kept) {
                words[r] = VALUE_PLANE_FIXED ? codes : codes >> shift;
            } else if constexpr (VALUE_SPAN_RANGES) {
                words[r] = code_halves(codes, (u32)VALUE_CENTRE, shift);
            } else {
                const int channel = 16 * n + 8 * (r % 2) + (lane >> 2);
                RangePair range = VALUE_TOKEN_RANGES ? of_run.of_tokens[half][r / 2] : of_tokens[r / 2];
                if (!VALUE_TOKEN_RANGES && !VALUE_BLOCKS_SHARE_RANGES) {
                    range = value_range_pair(ranges, RunRanges::token(run, half, r, lane), channel);
                }
                words[r] = multiply_add_pair(code_halves(codes, 0u, shift), range.scales, range.minimums);
            }
        }
        to.put_values(2 * run + half, n, words, lane);
    }
}

// Unpacks values of 32 tokens, every `step`-th block of 16 channels from `first` on.
template <typename Halves>
__device__ __forceinline__ void unpack_values(const Halves& to, u32 from, u32 ranges, int run, int first, int step, int lane) {
    const RunRanges of_run(ranges, run, lane);
#pragma unroll 1
    for (int n = first; n < VALUE_BLOCKS; n += step) unpack_value_block(to, from, ranges, of_run, run, n, lane);
}
