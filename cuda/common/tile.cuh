// Tiles in MMA fragment order (`format::TileOrder::MmaFragment`) of one format of keys and one of values.
//
// A tile is a series of loads of 512 bytes, 16 for each lane of a warp. A lane loads the words of its own A fragments:
// word r belongs to fragment register r. A *block* is the operand of one MMA: 16 tokens by 32 channels of packed keys,
// or 16 by 16 of f16 keys and of values. A load holds one block for each bit plane (two for values, from neighbouring
// blocks of 16 tokens), counted channels first. At 3 bits the loads of the low two bits are followed by those of the
// top bits, which have eight planes.
//
// Tiles of f16 are matrices of 8 rows by 8 halves, 128 bytes each: what `wgmma` reads where it lies, and `ldmatrix` as
// fragments. Rows are tokens for keys, [8 tokens][8 channels], and channels for values,
// [16 tokens][8 channels][8 tokens].

#pragma once

#include "common/ptx.cuh"

#ifndef HEAD_DIM
// Channels as stored, a multiple of 32, and the channels of the tensors.
#define HEAD_DIM 128
#define TENSOR_CHANNELS 128
#define KEY_BITS 4
#define VALUE_BITS 4
#define KEY_GROUP_TOKENS 0
#define KEY_GROUP_CHANNELS 0
#define VALUE_GROUP_TOKENS 0
#define VALUE_GROUP_CHANNELS 0
#define KEY_SYMMETRIC 0
#define VALUE_SYMMETRIC 0
#define KEY_LEVEL_UNIT 0
#define VALUE_LEVEL_UNIT 0
#define KEY_SKETCH_LEVEL 0
#define KEY_SKETCH_SEED 0
#define KEY_RENORMALIZED 0
#define VALUE_RENORMALIZED 0
#endif

// Marks, in the tables of a step, the address of a page in which the step stores something.
constexpr u64 FRESH_PAGE = 1ull << 63;

constexpr int TILE_TOKENS = 128;
constexpr int LOAD_BYTES = 512;
// MMA steps take 16 tokens.
constexpr int BLOCK_TOKENS = 16;
// Channels of a lane when a warp holds a row: lane, lane + 32, …
constexpr int LANE_CHANNELS = HEAD_DIM / 32;

// Bytes of a matrix of 8 × 8 halves.
constexpr int MATRIX_BYTES = 128;

// Keys: channels of a block, blocks of 16 tokens, blocks of one load.
constexpr int KEY_CHANNELS = KEY_BITS == 16 ? 16 : 32;
constexpr int KEY_BLOCKS = HEAD_DIM / KEY_CHANNELS;
constexpr int KEY_PLANES = KEY_BITS == 16 ? 1 : KEY_BITS == 3 ? 4 : 8 / KEY_BITS;

// Values: tokens of a run whose blocks share loads, blocks of 16 channels, blocks of channels in one load.
constexpr int VALUE_RUN = VALUE_BITS == 16 ? 16 : 32;
constexpr int VALUE_BLOCKS = HEAD_DIM / 16;
constexpr int VALUE_PLANES = VALUE_BITS == 16 ? 1 : VALUE_BITS == 3 ? 4 : 8 / VALUE_BITS;
// Planes of the top bits at 3 bits.
constexpr int TOP_PLANES = 8;
// Whether a block of channels has the same bit plane in every run of tokens.
constexpr bool VALUE_PLANE_FIXED = VALUE_BLOCKS % VALUE_PLANES == 0;

// Tile ranges of groups of this many tokens and channels. None if a range spans all tokens, and none for f16.
constexpr bool KEY_TILE_RANGES = KEY_GROUP_TOKENS > 0;
constexpr bool VALUE_TILE_RANGES = VALUE_GROUP_TOKENS > 0;
// One range for each token.
constexpr bool KEY_TOKEN_RANGES = KEY_GROUP_TOKENS == 1 && KEY_GROUP_CHANNELS == HEAD_DIM;
constexpr bool VALUE_TOKEN_RANGES = VALUE_GROUP_TOKENS == 1 && VALUE_GROUP_CHANNELS == HEAD_DIM;
// One for each channel over the span.
constexpr bool KEY_SPAN_RANGES = KEY_BITS != 16 && !KEY_TILE_RANGES;
constexpr bool VALUE_SPAN_RANGES = VALUE_BITS != 16 && !VALUE_TILE_RANGES;
// Groups of tokens of a channel, or groups of channels of a token.
constexpr bool KEY_GROUPED = KEY_TILE_RANGES && !KEY_TOKEN_RANGES;
constexpr bool VALUE_GROUPED = VALUE_TILE_RANGES && !VALUE_TOKEN_RANGES;
// Groups of channels in a row, or 1 without groups. Keys count only the channels of the tensors, values also those of
// the padding.
constexpr int KEY_ROW_GROUPS = KEY_GROUP_CHANNELS > 1 ? HEAD_DIM / (KEY_GROUP_CHANNELS + !KEY_GROUP_CHANNELS) : 1;
constexpr int VALUE_ROW_GROUPS = VALUE_GROUP_CHANNELS > 1 ? (HEAD_DIM + VALUE_GROUP_CHANNELS - 1) / (VALUE_GROUP_CHANNELS + !VALUE_GROUP_CHANNELS) : 1;
// Fields of keys with sketches have a sign as their top bit. Below it is the code of a level, unless the sketch is
// alone.
constexpr bool KEY_SKETCHED = KEY_SKETCH_LEVEL != 0;
constexpr int KEY_LEVEL_BITS = KEY_BITS - KEY_SKETCHED;
// Codes of a codebook. Codes of 1 bit are an affine grid of two.
constexpr bool KEY_LEVELS = KEY_LEVEL_UNIT != 0 && KEY_LEVEL_BITS > 1;
constexpr bool VALUE_LEVELS = VALUE_LEVEL_UNIT != 0 && VALUE_BITS > 1;

template <int TOKENS, int GROUP>
constexpr u32 RANGES_PER_TILE = TILE_TOKENS / TOKENS * ((HEAD_DIM + GROUP - 1) / GROUP);
template <>
constexpr u32 RANGES_PER_TILE<0, 0> = 0;

// The part of a page that belongs to one KV head: tile of keys, tile of values, ranges of keys, ranges of values.
constexpr u32 KEY_TILE_BYTES = TILE_TOKENS * HEAD_DIM * KEY_BITS / 8;
constexpr u32 VALUE_TILE_BYTES = TILE_TOKENS * HEAD_DIM * VALUE_BITS / 8;
constexpr u32 KEY_RANGE_BYTES = 4 * RANGES_PER_TILE<KEY_GROUP_TOKENS, KEY_GROUP_CHANNELS>;
constexpr u32 VALUE_RANGE_BYTES = 4 * RANGES_PER_TILE<VALUE_GROUP_TOKENS, VALUE_GROUP_CHANNELS>;
constexpr u32 VALUES_AT = KEY_TILE_BYTES;
// Offset of the top bits in a tile of 3-bit codes.
constexpr u32 TOPS_AT = TILE_TOKENS * HEAD_DIM * 2 / 8;
constexpr u32 KEY_RANGES_AT = VALUES_AT + VALUE_TILE_BYTES;
constexpr u32 VALUE_RANGES_AT = KEY_RANGES_AT + KEY_RANGE_BYTES;
constexpr u32 HEAD_BYTES = VALUE_RANGES_AT + VALUE_RANGE_BYTES;

// A fragments of 16 tokens by 16 channels of f16 keys, and of 16 channels by 16 tokens of f16 values. `from` is where
// the 16 tokens begin in shared memory; each lane names a row of a matrix.
__device__ __forceinline__ uint4 load_key_halves(u32 from, int f, int lane) {
    const int r = lane / 8;
    return load_matrices(from + r % 2 * (HEAD_DIM * 16) + (2 * f + r / 2) * MATRIX_BYTES + lane % 8 * 16);
}

__device__ __forceinline__ uint4 load_value_halves(u32 from, int n, int lane) {
    const int r = lane / 8;
    return load_matrices(from + (4 * n + r % 2 * 2 + r / 2) * MATRIX_BYTES + lane % 8 * 16);
}
