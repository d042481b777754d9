// Maps floats to bits that have the same order, for atomic maxima. 0 lies below every float's.

#pragma once

__device__ __forceinline__ u32 ordered_bits(float x) {
    const u32 bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(u32 bits) {
    return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}
