// Elements of an engine's dense tensors, whose type the call names: the host's `ElementType`.

#pragma once

constexpr u32 ELEMENTS_F32 = 0;
constexpr u32 ELEMENTS_F16 = 1;
constexpr u32 ELEMENTS_BF16 = 2;

// The element of these bits.
__device__ __forceinline__ float element_value(u32 type, u32 bits) {
    if (type == ELEMENTS_F32) return __uint_as_float(bits);
    return type == ELEMENTS_F16 ? half_value(bits) : bfloat_value(bits);
}

// The element of a query. Infinities become NaN. All scores of an infinite query may be minus infinity, as if it saw no
// token.
__device__ __forceinline__ float query_value(u32 type, u32 bits) {
    const u32 value = __float_as_uint(element_value(type, bits));
    return __uint_as_float((value & 0x7f800000u) == 0x7f800000u ? value | 0x00400000u : value);
}

__device__ __forceinline__ float load_element(const void* elements, u32 type, u64 index) {
    return element_value(type, type == ELEMENTS_F32 ? ((const u32*)elements)[index] : ((const u16*)elements)[index]);
}

// Rounds to the nearest, ties to even.
__device__ __forceinline__ void store_element(void* elements, u32 type, u64 index, float x) {
    if (type == ELEMENTS_F32) {
        ((float*)elements)[index] = x;
    } else {
        ((u16*)elements)[index] = (u16)(type == ELEMENTS_F16 ? half_bits(x) : bfloat_bits(x));
    }
}
