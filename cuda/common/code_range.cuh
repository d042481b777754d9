// Ranges and codes: `format::CodeRange`, bit for bit. Intrinsics that round each operation by itself keep compilers
// from fusing any two.

#pragma once

// Scales below 2^-100 count as 0.
constexpr float MIN_SCALE = 7.888609e-31f;

// Numbers too small for single precision, and the negative zero, as zero.
__device__ __forceinline__ float flushed(float x) { return (__float_as_uint(x) & 0x7fffffffu) < 0x00800000u ? 0.0f : x; }

// (scale, minimum) of a group whose extremes are `low` and `high`.
template <int BITS>
__device__ __forceinline__ float2 code_range(float low, float high, float shrink) {
    const float smallest = flushed(__fmul_rn(flushed(low), shrink));
    const float largest = flushed(__fmul_rn(flushed(high), shrink));
    const float scale = __fdiv_rn(__fsub_rn(largest, smallest), (float)((1 << BITS) - 1));
    return make_float2(scale < MIN_SCALE ? 0.0f : scale, smallest);
}

// A range as tiles store it: two halves, the scale in the low one, and 0 if it were subnormal.
__device__ __forceinline__ u32 range_word(float2 range) {
    const u32 scale = half_bits(range.x);
    return (scale < 0x400u ? 0u : scale) | half_bits(range.y) << 16;
}

__device__ __forceinline__ float2 range_of_word(u32 word) {
    return make_float2(half_value(word & 0xffffu), half_value(word >> 16));
}

// The nearest code, ties to the even one: an estimate that is at most one off, then decided by comparing with the
// midpoints between levels.
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
