// Codes of a codebook and norms of rows: `format::Codebook` and `format::codebook::stored_norm`, bit for bit.
//
// Levels are ±(step + ½) · unit. Code 2^(bits−1) + i is level i above 0, code 2^(bits−1) − 1 − i its negative.

#pragma once

#include "common/rows.cuh"

// Bits of the unit as a float, 0 for codes with ranges.
template <bool VALUE>
constexpr u32 LEVEL_UNIT = VALUE ? VALUE_LEVEL_UNIT : KEY_LEVEL_UNIT;
template <bool VALUE>
constexpr bool CODEBOOK = LEVEL_UNIT<VALUE> != 0;
// Bits of the level of a sketch as a float (`format::sketch_level`), 0 if fields have no sketch sign. Keys only.
template <bool VALUE>
constexpr u32 SKETCH_LEVEL = VALUE ? 0 : KEY_SKETCH_LEVEL;
template <bool VALUE>
constexpr bool SKETCHED = SKETCH_LEVEL<VALUE> != 0;
// Whether norms are stored divided by those of the levels (`format::codebook::renormalized`).
template <bool VALUE>
constexpr bool RENORMALIZED = VALUE ? VALUE_RENORMALIZED : KEY_RENORMALIZED;
// Whether rows are turned into fields before they are packed (common/sketch.cuh).
template <bool VALUE>
constexpr bool CODED_ROWS = SKETCHED<VALUE> || RENORMALIZED<VALUE>;
// The sign is the top bit of a field. If it is the only bit, there are no levels.
template <bool VALUE>
constexpr int LEVEL_BITS = FORMAT_BITS<VALUE> - SKETCHED<VALUE>;

// Level i above 0, relative to the norm. `i` is a constant once loops are unrolled.
template <bool VALUE>
__device__ __forceinline__ float level_above_zero(u32 i) {
    constexpr int bits = LEVEL_BITS<VALUE>;
    u32 step = 0;
    if (bits == 2) step = i == 0 ? 18 : 61;
    if (bits == 3) step = i == 0 ? 12 : i == 1 ? 39 : i == 2 ? 69 : 110;
    if (bits == 4) {
        const u32 low = i == 0 ? 4 : i == 1 ? 13 : i == 2 ? 22 : 31;
        const u32 high = i == 4 ? 41 : i == 5 ? 53 : i == 6 ? 68 : 88;
        step = i < 4 ? low : high;
    }
    return __fmul_rn((float)step + 0.5f, __uint_as_float(LEVEL_UNIT<VALUE>));
}

// The nearest level's code. A boundary belongs to the lower level.
template <bool VALUE>
__device__ __forceinline__ u32 level_code(float x, float norm) {
    constexpr u32 levels = 1u << (LEVEL_BITS<VALUE> - 1);
    if (norm == 0.0f) return 0u;
    const bool negative = !(x > 0.0f);
    const float magnitude = fabsf(x);
    u32 index = 0;
#pragma unroll
    for (u32 i = 0; i + 1 < levels; i++) {
        const float sum = __fadd_rn(level_above_zero<VALUE>(i), level_above_zero<VALUE>(i + 1));
        const float boundary = __fmul_rn(norm, sum * 0.5f);
        index += magnitude > boundary || (magnitude == boundary && negative);
    }
    return negative ? levels - 1 - index : levels + index;
}

template <bool VALUE>
__device__ __forceinline__ float level_value(u32 code, float norm) {
    constexpr u32 levels = 1u << (LEVEL_BITS<VALUE> - 1);
    const u32 index = code < levels ? levels - 1 - code : code - levels;
    float level = level_above_zero<VALUE>(0);
#pragma unroll
    for (u32 i = 1; i < levels; i++) level = index == i ? level_above_zero<VALUE>(i) : level;
    return __fmul_rn(norm, code < levels ? -level : level);
}

// The exact square of the midpoint between a half and the next one.
__device__ __forceinline__ float midpoint_square(u32 half) {
    const float middle = (half_value(half) + half_value(half + 1)) * 0.5f;
    return __fmul_rn(middle, middle);
}

// The half nearest to the root of `sum / divisor`, ties to even. The inexact root only decides where to search.
__device__ __forceinline__ u32 nearest_root(float sum, float divisor) {
    const u32 estimate = half_bits(fminf(__fsqrt_rn(__fdiv_rn(sum, divisor)), 65504.0f));
    const float below = __fmul_rn(midpoint_square(estimate > 0 ? estimate - 1 : 0), divisor);
    const float above = __fmul_rn(midpoint_square(estimate), divisor);
    const bool odd = estimate & 1u;
    u32 half = estimate;
    if (estimate > 0 && (sum < below || (sum == below && odd))) {
        half = estimate - 1;
    } else if (estimate < 0x7bff && (sum > above || (sum == above && odd))) {
        half = estimate + 1;
    }
    // A subnormal half counts as the nearer of 0 and the smallest normal one.
    return half >= 0x400u ? half : half >= 0x200u ? 0x400u : 0u;
}

// The sum of the squares of a row with elements `at(channel)`, computed by a warp.
template <typename At>
__device__ __forceinline__ float warp_sum_of_squares(int lane, At at) {
    // Bits of 2^-50: smaller elements count as 0.
    const auto square = [](float x) {
        return (__float_as_uint(x) & 0x7fffffffu) < 0x26800000u ? 0.0f : __fmul_rn(x, x);
    };
    float sum = 0.0f;
    for (int first = 0; first < HEAD_DIM; first += 128) {
        const int channel = first + 4 * lane;
        float four = 0.0f;
        if (channel < HEAD_DIM) {
            four = __fadd_rn(__fadd_rn(square(at(channel)), square(at(channel + 1))),
                             __fadd_rn(square(at(channel + 2)), square(at(channel + 3))));
        }
        // Past the end there are only zeros.
        for (int i = 0; i < 32; i++) sum = __fadd_rn(sum, __shfl_sync(ALL_LANES, four, i));
    }
    return sum;
}

// The norm of such a row, as stored in tiles.
template <typename At>
__device__ __forceinline__ u32 warp_norm(int lane, At at) {
    return nearest_root(warp_sum_of_squares(lane, at), 1.0f);
}
