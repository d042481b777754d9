// What packed tiles become before they are multiplied as halves:
//
//   ranges of the tile:      half = minimum + scale · code, rounded once (scales and minimums are halves)
//   ranges of the span:      half = code − CENTRE, exactly; scales and minimums are for the reader
//                            half = code · 2^(place − 24), exactly, where bits are kept: the subnormal half that they are
//   ranges of tokens:        the same where bits are kept, and half = (step + 128) · 2^−24 for levels of a codebook
//   levels of a codebook:    half = norm · (step + ½) / 128, rounded once (norms are halves); units are for the reader

#pragma once

#include "common/tile.cuh"

// False if tiles are read directly: f16 tiles are multiplied in place.
constexpr bool UNPACKS = KEY_BITS != 16 || VALUE_BITS != 16;
// Bytes of the halves of a tile of keys, or of values.
constexpr u32 TILE_HALVES_BYTES = TILE_TOKENS * HEAD_DIM * 2;
// Steps of 16 channels, which one MMA multiplies.
constexpr int CHANNEL_STEPS = HEAD_DIM / 16;
// The code that counts as 0 in products.
constexpr float KEY_CENTRE = KEY_BITS == 16 ? 0.0f : (float)(1 << (KEY_BITS % 16 - (KEY_BITS < 16)));
constexpr float VALUE_CENTRE = VALUE_BITS == 16 ? 0.0f : (float)(1 << (VALUE_BITS % 16 - (VALUE_BITS < 16)));

// Rows of attend_drafts, which other kernels do not define.
#ifndef DRAFT_ROWS
#define DRAFT_ROWS 0
#endif

// Whether codes, or bytes of levels with 128 added, are multiplied as the subnormal halves that their bits are: by
// attend_drafts. Where every token has a range, it is applied to products of keys, and to weights of values.
constexpr bool KEY_FOLDED = DRAFT_ROWS > 0 && KEY_TOKEN_RANGES;
// With 64 rows, levels of values leave no registers for that.
constexpr bool VALUE_FOLDED = DRAFT_ROWS > 0 && VALUE_TOKEN_RANGES && !(VALUE_LEVELS && DRAFT_ROWS > 32);
constexpr bool KEY_BITS_KEPT = DRAFT_ROWS > 0 && KEY_SPAN_RANGES || KEY_FOLDED;
constexpr bool VALUE_BITS_KEPT = DRAFT_ROWS > 0 && VALUE_SPAN_RANGES || VALUE_FOLDED;
// What is kept of a codebook and counts as 0.
template <int BITS>
constexpr float KEPT_MIDDLE = BITS == 1 ? 0.5f : 127.5f;

// The factor of codes whose bits are kept, and are not shifted.
constexpr float KEPT_UNIT = 16777216.0f;

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

// The factor of halves of a codebook.
__device__ __forceinline__ float halves_unit(u32 level_unit, bool kept) {
    return level_unit == 0 ? 1.0f : (kept ? 1.0f : 128.0f) * __uint_as_float(level_unit);
}
