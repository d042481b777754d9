// Weighted values of one pass of a warp: rows are 16 channels, columns the heads, the sum runs over 16 tokens.

// The A fragment of one block of values: pairs of halves of two tokens.
//
// Packed codes are masked where they lie: as a half, code · 2^shift · 2^-24 is subnormal, exact, and the MMA multiplies
// it exactly. The second half of a run of 32 tokens lies in the upper byte of each half.
__device__ __forceinline__ void value_block(u32 (&a)[4], const uint4& load, int plane, int half) {
    const u32 words[4] = {load.x, load.y, load.z, load.w};
    constexpr u32 mask = VALUE_BITS == 16 ? 0u : ((1u << (VALUE_BITS % 16)) - 1u) * 0x00010001u;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if (VALUE_BITS == 16) {
            a[r] = words[r];
        } else if (VALUE_PLANE_FIXED) {
            const u32 shifted = half == 0 ? words[r] : words[r] >> 8;
            a[r] = shifted & (mask << (VALUE_BITS * plane));
        } else {
            a[r] = (words[r] >> (8 * half + VALUE_BITS * plane)) & mask;
        }
    }
}

// What undoes the place of the codes of a block of 16 channels.
__device__ __forceinline__ float value_unit(int block) {
    if (VALUE_BITS == 16) return 1.0f;
    const int shift = VALUE_PLANE_FIXED ? VALUE_BITS * (block % VALUE_PLANES) : 0;
    return __int_as_float((127 + 24 - shift) << 23);
}

// `weights` are the B fragments of the pass's blocks of 16 tokens.
__device__ __forceinline__ void pass_values(float (&sums)[VALUE_BLOCKS][4], u32 values, int lane,
                                            const u32 (&weights)[PASS_BLOCKS][2]) {
    uint4 load;
#pragma unroll
    for (int run = 0; run < PASS_TOKENS / VALUE_RUN; run++) {
#pragma unroll
        for (int block = 0; block < VALUE_BLOCKS; block++) {
            const int index = run * VALUE_BLOCKS + block;
            if (index % VALUE_PLANES == 0) {
                load = load_shared_16(values + index / VALUE_PLANES * LOAD_BYTES + lane * 16);
            }
#pragma unroll
            for (int half = 0; half < VALUE_RUN / BLOCK_TOKENS; half++) {
                u32 a[4];
                value_block(a, load, index % VALUE_PLANES, half);
                const int m = run * (VALUE_RUN / BLOCK_TOKENS) + half;
                multiply_f16(sums[block], a, weights[m][0], weights[m][1]);
            }
        }
    }
}
