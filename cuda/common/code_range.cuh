// Ranges and codes: `format::AffineFormat` and `CodeRange`, bit for bit, and fields of every format. Intrinsics that
// round each operation separately keep compilers from fusing any two.

#pragma once

#include "common/rows.cuh"
#include "common/codebook.cuh"
#include "common/sketch.cuh"

// Scales below 2^-100 count as 0.
constexpr float MIN_SCALE = 7.888609e-31f;

// Numbers too small for single precision, and the negative zero, as zero.
__device__ __forceinline__ float flushed(float x) { return (__float_as_uint(x) & 0x7fffffffu) < 0x00800000u ? 0.0f : x; }

constexpr float HALF_MAX = 65504.0f;
// The smallest normal half, 2^-14.
constexpr u32 SMALLEST_NORMAL = 0x400u;

template <bool VALUE>
constexpr int CODE_BITS = FORMAT_BITS<VALUE> == 16 ? 8 : FORMAT_BITS<VALUE>;
template <bool VALUE>
constexpr float MIDDLE_CODE = 1 << (CODE_BITS<VALUE> - 1);

template <bool VALUE>
__device__ __forceinline__ float2 about_zero(float scale) {
    return make_float2(scale, scale == 0.0f ? 0.0f : -MIDDLE_CODE<VALUE> * scale);
}

template <bool VALUE>
__device__ __forceinline__ float scale_of(float spread) {
    constexpr int steps = (1 << (CODE_BITS<VALUE> - SYMMETRIC<VALUE>)) - 1;
    const float scale = __fdiv_rn(spread, (float)steps);
    return scale < MIN_SCALE ? 0.0f : scale;
}

__device__ __forceinline__ float shrunk(float x, float shrink) { return flushed(__fmul_rn(flushed(x), shrink)); }

// (scale, minimum) of a group whose extremes are `low` and `high`.
template <bool VALUE>
__device__ __forceinline__ float2 code_range(float low, float high, float shrink) {
    const float smallest = shrunk(low, shrink);
    const float largest = shrunk(high, shrink);
    if (SYMMETRIC<VALUE>) return about_zero<VALUE>(scale_of<VALUE>(fmaxf(fabsf(smallest), fabsf(largest))));
    return make_float2(scale_of<VALUE>(__fsub_rn(largest, smallest)), smallest);
}

// The range of a group whose extremes are `low` and `high` as tiles store it: two halves, the scale in the low one. A
// scale that is not 0 is a normal half, because other backends may read a subnormal one as 0
// (`format::CodeRange::rounded_to_f16`). A group that spans less than that is stored as its middle.
template <bool VALUE>
__device__ __forceinline__ u32 range_word(float low, float high, float shrink) {
    float2 range = code_range<VALUE>(low, high, shrink);
    const float top = shrunk(high, shrink);
    if (!SYMMETRIC<VALUE> && __fsub_rn(top, range.y) < half_value(SMALLEST_NORMAL)) {
        range = make_float2(0.0f, flushed(__fmul_rn(0.5f, flushed(__fadd_rn(range.y, top)))));
    }
    const u32 rounded = half_bits(fminf(range.x, SYMMETRIC<VALUE> ? HALF_MAX / MIDDLE_CODE<VALUE> : HALF_MAX));
    const u32 scale = range.x == 0.0f ? 0u : max(rounded, SMALLEST_NORMAL);
    const float minimum = SYMMETRIC<VALUE> ? about_zero<VALUE>(half_value(scale)).y : range.y;
    return scale | half_bits(fminf(fmaxf(minimum, -HALF_MAX), HALF_MAX)) << 16;
}

__device__ __forceinline__ float2 range_of_word(u32 word) {
    return make_float2(half_value(word & 0xffffu), half_value(word >> 16));
}

// The nearest code, ties to the even one. The estimate is at most one off; a comparison with the midpoints between
// levels decides.
template <int BITS>
__device__ __forceinline__ u32 code_of(float value, float2 range) {
    constexpr u32 max_code = (1u << BITS) - 1u;
    if (range.x == 0.0f) return 0u;
    const float distance = __fsub_rn(value, range.y);
    const float estimate = fminf(fmaxf(floorf(__fadd_rn(__fdiv_rn(distance, range.x), 0.5f)), 0.0f), (float)max_code);
    const u32 code = (u32)estimate;
    const float below = __fmul_rn(__fsub_rn(estimate, 0.5f), range.x);
    const float above = __fmul_rn(__fadd_rn(estimate, 0.5f), range.x);
    const bool odd = code & 1u;
    if (code > 0u && (distance < below || (distance == below && odd))) return code - 1u;
    if (code < max_code && (distance > above || (distance == above && odd))) return code + 1u;
    return code;
}

__device__ __forceinline__ float value_of(u32 code, float2 range) {
    return __fadd_rn(__fmul_rn(range.x, (float)code), range.y);
}

// The place of an element's range among those of its tile: [token group][channel], [token] or [channel group][token].
template <bool VALUE>
__device__ __forceinline__ u32 range_index(u32 slot, u32 channel) {
    if constexpr (GROUP_CHANNELS<VALUE> == 1) return slot / GROUP_TOKENS<VALUE> * HEAD_DIM + channel;
    return channel / GROUP_CHANNELS<VALUE> * TILE_TOKENS + slot;
}

// The range of an element of a tile. `part` is the head's part of the page, `span_ranges` are those of its span.
template <bool VALUE>
__device__ __forceinline__ float2 element_range(const u8* part, const float2* span_ranges, u32 slot, u32 channel) {
    if constexpr (FORMAT_BITS<VALUE> == 16) {
        return make_float2(0.0f, 0.0f);
    } else if constexpr (TILE_RANGES<VALUE>) {
        return range_of_word(((const u32*)(part + TILE_RANGES_AT<VALUE>))[range_index<VALUE>(slot, channel)]);
    } else {
        return span_ranges[channel];
    }
}

// The field that stores an element. In a row that was coded whole, the element already is its field
// (common/sketch.cuh).
template <bool VALUE>
__device__ __forceinline__ u32 field_bits(float x, float2 range) {
    if constexpr (FORMAT_BITS<VALUE> == 16) {
        return half_bits(x);
    } else if constexpr (CODED_ROWS<VALUE>) {
        return __float_as_uint(x) ^ FLIPPED<VALUE>;
    } else if constexpr (CODEBOOK<VALUE>) {
        return level_code<VALUE>(x, range.x) ^ FLIPPED<VALUE>;
    } else {
        return code_of<FORMAT_BITS<VALUE>>(x, range) ^ FLIPPED<VALUE>;
    }
}

// The value of a field. For a sketched row, the value of its level.
template <bool VALUE>
__device__ __forceinline__ float field_value(u32 bits, float2 range) {
    if constexpr (FORMAT_BITS<VALUE> == 16) {
        return half_value(bits);
    } else if constexpr (SKETCHED<VALUE>) {
        return sketched_level<VALUE>(bits ^ FLIPPED<VALUE>, range.x);
    } else if constexpr (CODEBOOK<VALUE>) {
        return level_value<VALUE>(bits ^ FLIPPED<VALUE>, range.x);
    } else {
        return value_of(bits ^ FLIPPED<VALUE>, range);
    }
}

// The range of elements `at(0)` … `at(count - 1)`, found by a warp, as tiles store it; of a codebook's row the
// norm, as a scale.
template <bool VALUE, typename At>
__device__ __forceinline__ u32 warp_range(u32 count, int lane, float shrink, At at) {
    if constexpr (CODEBOOK<VALUE>) return warp_norm(lane, at);
    float low = at(0);
    float high = low;
    for (u32 i = lane; i < count; i += 32) {
        const float x = at(i);
        low = fminf(low, x);
        high = fmaxf(high, x);
    }
    for (int step = 16; step > 0; step >>= 1) {
        low = fminf(low, __shfl_xor_sync(ALL_LANES, low, step));
        high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, step));
    }
    return range_word<VALUE>(low, high, shrink);
}
