// The weights of a layer in the order of devices: where codes and scales lie, and what they are as numbers.
//
// Codes come as f16 numbers 1024 + f · code, with a power of two f that depends on where they lie in a word.
//
// Macros: BITS, CHUNKS, GROUP_CHUNKS, OUTPUTS, SINGLE_SCALES (1 if scales are f32), IN_STRIPS (1 if chunks and scales
// lie in strips).

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 GROUPS = CHUNKS / GROUP_CHUNKS;

// Where a chunk of an output lies, and a scale. A strip has 16 outputs.
__device__ __forceinline__ size_t chunk_at(size_t output, u32 chunk) {
    if (!IN_STRIPS) return output * CHUNKS + chunk;
    return 64 * (output / 16 * (CHUNKS / 4) + chunk / 4) + output % 16 * 4 + chunk % 4;
}

__device__ __forceinline__ size_t scale_at(size_t output, u32 group) {
    if (!IN_STRIPS) return output * GROUPS + group;
    return 16 * (output / 16 * GROUPS + group) + output % 16;
}

// Where octet `octet` of a chunk comes among those of a row of activations. Where groups are whole steps of four
// chunks, chunk t of a step has the octets t, t + 4, t + 8 and t + 12. At 8 bits that took longer, so neighbours stay.
__device__ __forceinline__ u32 octet_at(u32 chunk, u32 octet) {
    if (GROUP_CHUNKS % 4 != 0 || BITS == 8) return 4 * chunk + octet;
    return 16 * (chunk / 4) + 4 * octet + chunk % 4;
}

struct Chunk {
    u32 words[BITS];
};

__device__ __forceinline__ uint4 load16(const void* at) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at));
    return x;
}

__device__ __forceinline__ Chunk load_chunk(u64 codes, size_t chunk) {
    Chunk c;
    const u32* at = reinterpret_cast<const u32*>(codes) + chunk * BITS;
    if constexpr (BITS % 4 == 0) {
#pragma unroll
        for (int i = 0; i < BITS / 4; i++) {
            const uint4 x = load16(at + 4 * i);
            c.words[4 * i] = x.x;
            c.words[4 * i + 1] = x.y;
            c.words[4 * i + 2] = x.z;
            c.words[4 * i + 3] = x.w;
        }
    } else if constexpr (BITS == 2) {
        const uint2 x = __ldg(reinterpret_cast<const uint2*>(at));
        c.words[0] = x.x;
        c.words[1] = x.y;
    } else {
#pragma unroll
        for (int i = 0; i < BITS; i++) c.words[i] = __ldg(at + i);
    }
    return c;
}

// The logarithm of f of a pair of codes.
__device__ __forceinline__ constexpr int log_factor(int pair) {
    if (BITS == 2) return 2 * (pair % 4);
    if (BITS == 4) return 4 * (pair % 2);
    if (BITS == 8 || pair == 15) return 0;
    const int at = pair % 5;
    return at < 3 ? 3 * at : 3 * (at - 3);
}

// A pair of codes as two f16 numbers 1024 + f · code.
__device__ __forceinline__ u32 field(const Chunk& c, int pair) {
    u32 word;
    if (BITS == 2) {
        word = c.words[pair / 8] >> (pair % 8 < 4 ? 0 : 8);
    } else if (BITS == 4) {
        word = c.words[pair / 4] >> (pair % 4 < 2 ? 0 : 8);
    } else if (BITS == 8) {
        word = c.words[pair / 2] >> (8 * (pair % 2));
    } else if (pair == 15) {
        word = ((c.words[0] >> 15) & 0x00010001u) | ((c.words[1] >> 14) & 0x00020002u) |
               ((c.words[BITS - 1] >> 13) & 0x00040004u);
    } else {
        word = c.words[pair / 5] >> (pair % 5 < 3 ? 0 : 9);
    }
    const u32 mask = ((1u << BITS) - 1u) << log_factor(pair);
    return (word & (mask | mask << 16)) | 0x64006400u;
}

__device__ __forceinline__ float2 floats_of(u32 halves) {
    float2 x;
    asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;\n}"
        : "=f"(x.x), "=f"(x.y)
        : "r"(halves));
    return x;
}

__device__ __forceinline__ u32 halves_of(float x, float y) {
    u32 halves;
    asm("{\n .reg .b16 low, high;\n cvt.rn.f16.f32 low, %1;\n cvt.rn.f16.f32 high, %2;\n mov.b32 %0, {low, high};\n}"
        : "=r"(halves)
        : "f"(x), "f"(y));
    return halves;
}

// Scale and zero of a group.
__device__ __forceinline__ float2 load_scale(u64 scales, size_t group) {
    if constexpr (SINGLE_SCALES) return __ldg(reinterpret_cast<const float2*>(scales) + group);
    return floats_of(__ldg(reinterpret_cast<const u32*>(scales) + group));
}

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ __forceinline__ u32 twice(float x) { return halves_of(x, x); }

// A pair of codes minus the zero, exactly.
__device__ __forceinline__ u32 weights_of(const Chunk& c, int pair, float zero) {
    const float by = 1.0f / (1 << log_factor(pair));
    return fma2(field(c, pair), twice(by), twice(-1024.0f * by - zero));
}

// A pair of weights, each rounded once to f16.
__device__ __forceinline__ u32 rounded_weights(const Chunk& c, int pair, float2 scale) {
    const u32 levels = weights_of(c, pair, scale.y);
    if constexpr (SINGLE_SCALES) {
        const float2 both = floats_of(levels);
        return halves_of(scale.x * both.x, scale.x * both.y);
    }
    u32 weights;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(weights) : "r"(levels), "r"(twice(scale.x)));
    return weights;
}

// Eight neighbouring weights of a chunk.
__device__ __forceinline__ uint4 rounded_octet(const Chunk& c, int octet, float2 scale) {
    return {rounded_weights(c, 4 * octet, scale), rounded_weights(c, 4 * octet + 1, scale),
            rounded_weights(c, 4 * octet + 2, scale), rounded_weights(c, 4 * octet + 3, scale)};
}
