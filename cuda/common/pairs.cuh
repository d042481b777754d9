// Codes of packed keys as pairs of halves, inside whose bits they lie: fragments for m16n8k16.

#pragma once

#include "common/tile.cuh"
#include "common/three_bits.cuh"

// Distance between the bit planes within a half, and number of planes in a half.
constexpr int KEY_PLANE_SHIFT = KEY_BITS == 1 ? 1 : KEY_BITS % 8;
constexpr int KEY_HALF_PLANES = KEY_BITS >= 8 || KEY_BITS == 3 ? 1 : KEY_BITS == 4 ? 2 : 4;

// The place of the codes of a block of channels within a half, if it is the same for all tokens; otherwise they are
// shifted down.
constexpr bool KEY_PLACES_FIXED = KEY_BLOCKS % KEY_HALF_PLANES == 0;
__device__ __forceinline__ int key_place(int block) {
    return KEY_PLACES_FIXED ? KEY_PLANE_SHIFT * (block % KEY_HALF_PLANES) : 0;
}

// The codes of channels 4 c + odd and 4 c + 2 + odd of one plane of a word, as halves.
__device__ __forceinline__ u32 key_pair(u32 word, int plane, int odd, bool shifted) {
    const int shift = KEY_PLANE_SHIFT * (plane % KEY_HALF_PLANES);
    constexpr u32 mask = ((1u << (KEY_BITS % 16)) - 1u) * 0x00010001u;
    u32 codes = odd ? word >> 8 : word;
    if (KEY_BITS == 1) {
        // Channels lie in nibbles. Those of one byte go to one half.
        codes = permute_bytes(word, 0u, plane < 4 ? 0x4140u : 0x4342u);
        if (odd) codes >>= 4;
    }
    if (KEY_BITS == 8) return (codes & mask) ^ 0x00800080u;
    // Codes of 1 bit are stored inverted.
    if (KEY_BITS == 1) codes = ~codes;
    return shifted ? codes >> shift & mask : codes & mask << shift;
}

// The A fragment of 16 tokens by channels 16 half … 16 half + 15 of a block of 32.
__device__ __forceinline__ void key_pairs(u32 (&a)[4], const uint4& load, const uint4& top, int block, int half,
                                          bool shifted) {
    const int plane = block % KEY_PLANES;
    u32 words[4] = {load.x, load.y, load.z, load.w};
    // Codes of 3 bits are assembled first.
    if (KEY_BITS == 3) three_bit_block(words, load, top, block);
#pragma unroll
    for (int r = 0; r < 4; r++) a[r] = key_pair(words[2 * half + r % 2], plane, r / 2, shifted);
}
