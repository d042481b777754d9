// Rows of dense tensors, and the places of their elements in tiles.

#pragma once

#include "common/elements.cuh"

struct RowsCall {
    // Dense elements of type `element_type`. `dequantize` writes f32 [kv head][token][channel].
    void* rows;
    // Addresses of the span's pages.
    const u64* pages;
    // Span ranges of the slot, [kv head][channel] of (scale, minimum).
    float2* ranges;
    // Strides in elements of the tensor.
    u64 token_stride;
    u64 head_stride;
    u32 first_token;
    // Tokens of the span.
    u32 tokens;
    u32 kv_heads;
    u32 element_type;
    float shrink;
    // For gathered tokens: `index_stride` token numbers per KV head, all below `below`. Memory safety does not depend
    // on them: a larger one selects the last token.
    u32 index_stride;
    const u32* indices;
    u32 below;
    // The largest valid element, for kernels that check elements.
    float largest;
    // The centre of the sequence's keys, [kv head][channel], if they are centred.
    float* centre;
};

// The token of the tensor for this token of the span.
__device__ __forceinline__ u32 token_of(const RowsCall& call, u32 token, u32 kv_head) {
    const u32 at = call.first_token + token;
    if (!call.indices) return at;
    return min(call.indices[(u64)kv_head * call.index_stride + at], call.below - 1u);
}

// Tokens are relative to the first of the span.
__device__ __forceinline__ u64 element_index(const RowsCall& call, u32 token, u32 kv_head, u32 channel) {
    return (u64)token_of(call, token, kv_head) * call.token_stride + (u64)kv_head * call.head_stride + channel;
}

// Channels beyond those of the tensor are 0.
__device__ __forceinline__ float element(const RowsCall& call, u32 token, u32 kv_head, u32 channel) {
    if (channel >= TENSOR_CHANNELS) return 0.0f;
    return load_element(call.rows, call.element_type, element_index(call, token, kv_head, channel));
}

// A warp loads a token's row.
__device__ __forceinline__ void load_row(float (&row)[LANE_CHANNELS], const RowsCall& call, u32 token, u32 kv_head,
                                         int lane) {
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) row[i] = element(call, token, kv_head, lane + 32 * i);
}

__device__ __forceinline__ void store_row(const RowsCall& call, u32 token, u32 kv_head,
                                          const float (&row)[LANE_CHANNELS], int lane) {
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
        const u32 channel = lane + 32 * i;
        if (channel < TENSOR_CHANNELS) ((float*)call.rows)[element_index(call, token, kv_head, channel)] = row[i];
    }
}

// Element of a tile, and the first bit of its field in a word; at 3 bits also the place of its top bit.
struct Field {
    u32 token;
    u32 channel;
    u32 shift;
};

template <bool VALUE>
constexpr int FORMAT_BITS = VALUE ? VALUE_BITS : KEY_BITS;
template <bool VALUE>
constexpr bool TILE_RANGES = VALUE ? VALUE_TILE_RANGES : KEY_TILE_RANGES;
template <bool VALUE>
constexpr u32 GROUP_TOKENS = VALUE ? VALUE_GROUP_TOKENS : KEY_GROUP_TOKENS;
template <bool VALUE>
constexpr u32 GROUP_CHANNELS = VALUE ? VALUE_GROUP_CHANNELS : KEY_GROUP_CHANNELS;
// Channels of a group that the head has. Fewer if one range covers a whole padded row.
template <bool VALUE>
constexpr u32 GROUP_ELEMENTS = GROUP_CHANNELS<VALUE> < TENSOR_CHANNELS ? GROUP_CHANNELS<VALUE> : TENSOR_CHANNELS;
// Whether ranges are symmetric about 0: computed from the largest magnitude over one bit less, with the middle code 0.
template <bool VALUE>
constexpr bool SYMMETRIC = VALUE ? VALUE_SYMMETRIC : KEY_SYMMETRIC;
template <bool VALUE>
constexpr u32 RANGES = (VALUE ? VALUE_RANGE_BYTES : KEY_RANGE_BYTES) / 4;
template <bool VALUE>
constexpr u32 TILE_WORDS = (VALUE ? VALUE_TILE_BYTES : KEY_TILE_BYTES) / 4;
// A unit holds whole fields: it is a word, or at 3 bits a word of top bits and the two words of low bits that belong to
// it.
template <bool VALUE>
constexpr u32 UNIT_WORDS = FORMAT_BITS<VALUE> == 3 ? 3 : 1;
template <bool VALUE>
constexpr u32 UNIT_PLANES = UNIT_WORDS<VALUE> == 3 ? TOP_PLANES : VALUE ? VALUE_PLANES : KEY_PLANES;
template <bool VALUE>
constexpr u32 UNITS = TILE_WORDS<VALUE> / UNIT_WORDS<VALUE>;
template <bool VALUE>
constexpr u32 FIELDS = 32 * UNIT_WORDS<VALUE> / FORMAT_BITS<VALUE>;
template <bool VALUE>
constexpr u32 TILE_AT = VALUE ? VALUES_AT : 0;
template <bool VALUE>
constexpr u32 TILE_RANGES_AT = VALUE ? VALUE_RANGES_AT : KEY_RANGES_AT;
template <bool VALUE>
constexpr u32 FIELD_MASK = FORMAT_BITS<VALUE> == 16 ? 0xffffu : (1u << (FORMAT_BITS<VALUE> % 16)) - 1u;
// Keys of 8 bits are stored signed and those of 1 bit inverted.
template <bool VALUE>
constexpr u32 FLIPPED = !VALUE && (KEY_BITS == 8 || KEY_BITS == 1) ? 1u << (KEY_BITS - 1) : 0u;

// Field i of a unit of a tile.
template <bool VALUE>
__device__ __forceinline__ Field field_of(u32 unit, u32 i) {
    constexpr u32 plane_bits = FORMAT_BITS<VALUE> == 3 ? 1 : FORMAT_BITS<VALUE>;
    constexpr u32 planes = UNIT_PLANES<VALUE>;
    const u32 r = unit & 3u;
    const u32 c = unit >> 2 & 3u;
    const u32 g = unit >> 4 & 7u;
    const u32 load = unit >> 7;
    // Of a matrix of halves.
    const u32 matrix = unit >> 5;
    const u32 row = unit >> 2 & 7u;
    const u32 column = 2 * (unit & 3u) + i;
    if constexpr (VALUE && VALUE_BITS == 16) {
        constexpr u32 matrices = HEAD_DIM / 4;
        return {16 * (matrix / matrices) + 8 * (matrix & 1u) + column, matrix % matrices / 2 * 8 + row, 16 * i};
    } else if constexpr (VALUE) {
        const u32 byte = i & 3u;
        const u32 plane = i >> 2;
        const u32 block = load * planes + plane;
        return {32 * (block / VALUE_BLOCKS) + 16 * (byte & 1u) + 2 * c + 8 * (r >> 1) + (byte >> 1),
                16 * (block % VALUE_BLOCKS) + g + 8 * (r & 1u), 8 * byte + plane_bits * plane};
    } else if constexpr (KEY_BITS == 16) {
        constexpr u32 matrices = HEAD_DIM / 8;
        return {8 * (matrix / matrices) + row, matrix % matrices * 8 + column, 16 * i};
    } else {
        const u32 lane = i & 3u;
        const u32 plane = i >> 2;
        const u32 block = load * planes + plane;
        const u32 shift = KEY_BITS == 1 ? 4 * lane + (plane & 3u) + 16 * (plane >> 2) : 8 * lane + plane_bits * plane;
        return {16 * (block / KEY_BLOCKS) + g + 8 * (r & 1u), 32 * (block % KEY_BLOCKS) + 16 * (r >> 1) + 4 * c + lane,
                shift};
    }
}

// The words of a unit.
template <bool VALUE>
struct Unit {
    u32 words[UNIT_WORDS<VALUE>];

    // Word i of unit `unit` in its tile.
    __device__ __forceinline__ static u32 word(u32 unit, u32 i) {
        if constexpr (UNIT_WORDS<VALUE> == 1) return unit;
        return i == 2 ? 2 * UNITS<VALUE> + unit : unit / 128 * 256 + i * 128 + unit % 128;
    }

    __device__ __forceinline__ static Unit zeros() {
        Unit empty;
#pragma unroll
        for (u32 i = 0; i < UNIT_WORDS<VALUE>; i++) empty.words[i] = 0u;
        return empty;
    }

    __device__ __forceinline__ void load(const u32* tile, u32 unit) {
#pragma unroll
        for (u32 i = 0; i < UNIT_WORDS<VALUE>; i++) words[i] = tile[word(unit, i)];
    }

    __device__ __forceinline__ void store(u32* tile, u32 unit) const {
#pragma unroll
        for (u32 i = 0; i < UNIT_WORDS<VALUE>; i++) tile[word(unit, i)] = words[i];
    }

    // Field i, which begins at `shift`; i is a constant once loops are unrolled.
    __device__ __forceinline__ u32 get(u32 i, u32 shift) const {
        if constexpr (UNIT_WORDS<VALUE> == 1) return words[0] >> shift & FIELD_MASK<VALUE>;
        return words[i / 16] >> low_shift(i) & 3u | (words[2 % UNIT_WORDS<VALUE>] >> shift & 1u) << 2;
    }

    // Adds bits to a field that is zero.
    __device__ __forceinline__ void put(u32 i, u32 shift, u32 bits) {
        if constexpr (UNIT_WORDS<VALUE> == 1) {
            words[0] |= bits << shift;
        } else {
            words[i / 16] |= (bits & 3u) << low_shift(i);
            words[2 % UNIT_WORDS<VALUE>] |= (bits >> 2) << shift;
        }
    }

    // The first bit of the low two of three bits: 16 fields to a word, one byte lane after the other.
    __device__ __forceinline__ static u32 low_shift(u32 i) { return 8 * (i % 4) + 2 * (i / 4 % 4); }
};
