// Scores of one pass of a warp: tokens 16 m + 8 i + g of the pass in lane 4 g + c, heads c (or 2 c and 2 c + 1), as
// scores[(2 m + i) · LANE_HEADS + head].

constexpr int PASS_SCORES = PASS_BLOCKS * 2 * LANE_HEADS;

// The A fragment of one block of packed keys: one byte for each code.
//
// 4 and 2 bits are masked at the top of their bytes, after a shift to the left, which two pipes can do; where sums of so
// large numbers would not be exact, they are shifted to the right. At 1 bit the word itself selects bytes of a table: a nibble's first three bits
// choose the byte, and its fourth replaces the byte by its sign. Tables of 00 and ff do not mind the sign, and so yield
// −bit of one of the first three planes; the table of 01 alone yields 1 − bit of the fourth. Stored inverted, these are
// code − 1 and code.
__device__ __forceinline__ void key_block(u32 (&a)[4], const uint4& load, int plane, const SumConstants& constants) {
    const u32 words[4] = {load.x, load.y, load.z, load.w};
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if (KEY_BITS == 16 || KEY_BITS == 8) {
            a[r] = words[r];
        } else if (KEY_BITS == 1) {
            const u32 selector = plane < 4 ? words[r] : words[r] >> 16;
            const int bit = plane & 3;
            const u32 low = bit == 2 ? 0u : constants.bit_tables[bit];
            const u32 high = constants.bit_tables[bit];
            a[r] = permute_bytes(low, high, selector);
        } else if (KEYS_AT_TOP) {
            const u32 mask = KEY_BITS == 4 ? 0xf0f0f0f0u : 0xc0c0c0c0u;
            a[r] = (words[r] << (8 - KEY_BITS * (plane + 1))) & mask;
        } else {
            const u32 mask = KEY_BITS == 4 ? 0x0f0f0f0fu : 0x03030303u;
            a[r] = (words[r] >> (KEY_BITS * plane)) & mask;
        }
    }
}

// δ · Σ q · key of four accumulator registers, plus `base` of this lane's heads, for tokens g and g + 8.
__device__ __forceinline__ void pass_scores(float (&scores)[PASS_SCORES], const PassLoads& keys, int lane,
                                            const u32 (&query)[2 * QUERY_REGISTERS], const float (&delta)[LANE_HEADS],
                                            const float (&base)[KEY_VARIANTS][LANE_HEADS], const SumConstants& constants) {
    uint4 load;
    uint4 top;
    u32 levels[4][KEY_PLANES];
#pragma unroll
    for (int m = 0; m < PASS_BLOCKS; m++) {
        float sums[2 * LANE_HEADS];
        if (KEY_BITS == 16) {
            float products[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int f = 0; f < KEY_BLOCKS; f++) {
                load = load_shared_16(keys.at + (m * KEY_BLOCKS + f) * LOAD_BYTES + lane * 16);
                u32 a[4];
                key_block(a, load, 0, constants);
                multiply_f16(products, a, query[2 * f], query[2 * f + 1]);
                if (WIDE) {
                    const int low = KEY_BLOCKS + f;
                    multiply_f16(products, a, query[(2 * low) % (2 * QUERY_REGISTERS)],
                                 query[(2 * low + 1) % (2 * QUERY_REGISTERS)]);
                }
            }
            if (WIDE) {
#pragma unroll
                for (int i = 0; i < 2 * LANE_HEADS; i++) sums[i] = products[i];
            } else {
                sums[0] = products[0] + products[1];
                sums[1] = products[2] + products[3];
            }
        } else {
            int high[4];
            int low[4];
#pragma unroll
            for (int f = 0; f < KEY_BLOCKS; f++) {
                const int block = m * KEY_BLOCKS + f;
                if (block % KEY_PLANES == 0) {
                    load = load_shared_16(keys.at + block / KEY_PLANES * LOAD_BYTES + lane * 16);
                    if constexpr (KEY_LEVELS && KEY_BITS != 3) {
                        level_bytes<KEY_BITS, !QUERY_MIXES_PLANES>(levels[0], load.x, constants.level_tables);
                        level_bytes<KEY_BITS, !QUERY_MIXES_PLANES>(levels[1], load.y, constants.level_tables);
                        level_bytes<KEY_BITS, !QUERY_MIXES_PLANES>(levels[2], load.z, constants.level_tables);
                        level_bytes<KEY_BITS, !QUERY_MIXES_PLANES>(levels[3], load.w, constants.level_tables);
                    }
                }
                if (KEY_BITS == 3 && block % TOP_PLANES == 0) {
                    top = load_shared_16(keys.tops + block / TOP_PLANES * LOAD_BYTES + lane * 16);
                }
                u32 a[4];
                if constexpr (KEY_BITS == 3) {
                    three_bit_block(a, load, top, block);
#pragma unroll
                    for (int r = 0; r < 4; r++) a[r] = KEY_LEVELS ? three_bit_levels(a[r]) : a[r];
                } else if constexpr (KEY_LEVELS) {
#pragma unroll
                    for (int r = 0; r < 4; r++) a[r] = levels[r][block % KEY_PLANES];
                } else {
                    key_block(a, load, block % KEY_PLANES, constants);
                }
                constexpr bool is_signed = KEY_BITS == 8 || KEY_BITS == 1 || KEY_LEVELS;
                multiply_bytes<is_signed>(high, a, query[2 * f], query[2 * f + 1], f == 0 ? constants.key_start : high);
                if (WIDE) {
                    const int at = KEY_BLOCKS + f;
                    multiply_bytes<is_signed>(low, a, query[(2 * at) % (2 * QUERY_REGISTERS)],
                                              query[(2 * at + 1) % (2 * QUERY_REGISTERS)], f == 0 ? constants.key_start : low);
                }
            }
            // 256 · high is exact; the start of the low sum is part of `base`.
#pragma unroll
            for (int i = 0; i < 2 * LANE_HEADS; i++) {
                const float h = __int_as_float(WIDE ? high[i] : high[2 * i]);
                const float l = __int_as_float(WIDE ? low[i] : high[(2 * i + 1) % 4]);
                sums[i] = __fadd_rn(__fmaf_rn(h, 256.0f, -256.0f * SUM_START_FLOAT), l);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++) {
                scores[(2 * m + i) * LANE_HEADS + h] =
                    __fmaf_rn(sums[i * LANE_HEADS + h], delta[h], base[m % KEY_VARIANTS][h]);
            }
        }
    }
}
