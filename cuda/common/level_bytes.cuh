// Levels of a codebook as signed bytes, for MMAs: level = (byte + ½) · unit, see `format::codebook`. A negative level's
// byte is the complement of its opposite's. One permutation looks up four codes: nibbles of a word select bytes of
// tables.

#pragma once

// Words of the tables. At 4 bits: the levels above 0 and those below. At 2 bits: all four levels. Then those of codes
// below the sign of a sketch, whose top bit is flipped, at 3 bits and at 2.
constexpr int LEVEL_TABLES = 8;

__device__ __forceinline__ u32 level_table(int word) {
    if (word == 0) return 0x1f160d04u;
    if (word == 1) return 0x58443529u;
    if (word == 2) return 0xd6cabba7u;
    if (word == 3) return 0xfbf2e9e0u;
    if (word == 4) return 0x3d12edc2u;
    if (word == 5) return 0x6e45270cu;
    if (word == 6) return 0xf3d8ba91u;
    return 0xedc23d12u;
}

// Four codes of 4 bits, nibbles 4 HALF … 4 HALF + 3 of `word`. Their first three bits look up both tables. The fourth
// bit, spread over a byte as the sign of a byte whose top it is, chooses between them.
template <int HALF>
__device__ __forceinline__ u32 level_bytes_4(u32 word, u32 low_bits, u32 shifted, const u32 (&tables)[LEVEL_TABLES]) {
    const u32 selector = HALF == 0 ? low_bits : low_bits >> 16;
    const u32 above = permute_bytes(tables[0], tables[1], selector);
    const u32 below = permute_bytes(tables[2], tables[3], selector);
    const u32 positive = permute_bytes(shifted, word, HALF == 0 ? 0xd9c8u : 0xfbeau);
    return (above & positive) | (below & ~positive);
}

// The bytes of a word's codes of BITS bits, which may lie below the signs of a sketch, plane by plane. Unless SORTED,
// they stay in the order of the tables: the nibbles of a byte are two planes at 4 bits, and the pairs {0, 2} and {1, 3}
// at 2 bits. Bytes 0 and 1 of `planes[i]` then belong to channel 0 of both planes of pair i, bytes 2 and 3 to channel
// 1, and `planes[i + PLANES / 2]` has those of channels 2 and 3.
template <int BITS, bool BELOW_SIGNS, bool SORTED, int PLANES>
__device__ __forceinline__ void level_bytes(u32 (&planes)[PLANES], u32 word, const u32 (&tables)[LEVEL_TABLES]) {
    static_assert(BITS == (BELOW_SIGNS ? 3 : 4) ? PLANES == 2 : BITS == 2 && PLANES == 4, "planes of 4 or of 2 bits");
#pragma unroll
    for (int i = 0; i < PLANES / 2; i++) {
        u32 first;
        u32 second;
        if constexpr (BITS == 4) {
            const u32 low_bits = word & 0x77777777u;
            const u32 shifted = word << 4;
            first = level_bytes_4<0>(word, low_bits, shifted, tables);
            second = level_bytes_4<1>(word, low_bits, shifted, tables);
        } else {
            const u32 selector = BITS == 3 ? word & 0x77777777u : word >> (2 * i) & 0x33333333u;
            const u32 low = tables[BITS == 3 ? 5 : BELOW_SIGNS ? 7 : 4];
            const u32 high = BITS == 3 ? tables[6] : low;
            first = permute_bytes(low, high, selector);
            second = permute_bytes(low, high, selector >> 16);
        }
        planes[i] = SORTED ? permute_bytes(first, second, 0x6420u) : first;
        planes[i + PLANES / 2] = SORTED ? permute_bytes(first, second, 0x7531u) : second;
    }
}
