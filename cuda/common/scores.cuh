// Scores of one pass of a warp: tokens 16 m + 8 i + g of the pass in lane 4 g + c, heads c (or 2 c and 2 c + 1), as
// scores[(2 m + i) · LANE_HEADS + head].

constexpr int PASS_SCORES = LONE_HEAD ? PASS_TOKENS / 32 : PASS_BLOCKS * 2 * LANE_HEADS;

// The A fragment of one block of packed keys: one byte for each code. Codes of 3 bits and levels of codebooks are
// handled elsewhere (common/three_bits.cuh, common/level_bytes.cuh).
//
// Codes of 4 and 2 bits are masked at the top of their bytes, after a left shift, which two pipes can execute. If sums
// of such large numbers would not be exact, they are shifted to the right. At 1 bit the word itself selects bytes of a
// table: a nibble's first three bits choose the byte, and its fourth replaces the byte by its sign. Tables of 00 and ff
// are unaffected by the sign, and return −bit of one of the first three planes. The table of 01 alone returns 1 − bit
// of the fourth. Stored inverted, these are code − 1 and code.
__device__ __forceinline__ void key_block(u32 (&a)[4], const uint4& load, int plane, const SumConstants& constants) {
    const u32 words[4] = {load.x, load.y, load.z, load.w};
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if (KEY_BITS == 8) {
            a[r] = words[r];
        } else if (KEY_BITS == 1) {
            const u32 selector = plane < 4 ? words[r] : words[r] >> 16;
            const int bit = plane & 3;
            const u32 low = bit == 2 ? 0u : constants.bit_tables[bit];
            a[r] = permute_bytes(low, bit_table(bit), selector);
        } else if (KEYS_AT_TOP) {
            const u32 mask = KEY_BITS == 4 ? 0xf0f0f0f0u : 0xc0c0c0c0u;
            a[r] = (words[r] << (8 - KEY_BITS * (plane + 1))) & mask;
        } else {
            const u32 mask = KEY_BITS == 4 ? 0x0f0f0f0fu : 0x03030303u;
            a[r] = (words[r] >> (KEY_BITS * plane)) & mask;
        }
    }
}

// The words of a lane that hold the next blocks to multiply: of codes, or of the signs of a sketch above them.
template <bool SIGNS>
struct KeyWords {
    // Fields of one bit are only signs.
    static constexpr bool whole_fields = !SIGNS || KEY_BITS == 1;
    static constexpr bool looked_up = !SIGNS && KEY_LEVEL_WORDS;
    static constexpr bool has_tops = KEY_BITS == 3 && SIGNS == KEY_SKETCHED;
    static constexpr bool is_signed = whole_fields && (KEY_BITS == 8 || KEY_BITS == 1 || KEY_LEVELS);

    uint4 load;
    uint4 top;
    u32 levels[looked_up ? 4 : 1][KEY_PLANES];

    // The A fragment of a block of the pass. The block is the first or follows the previous one.
    __device__ __forceinline__ void next_block(u32 (&a)[4], const PassLoads& keys, int block, int lane,
                                               const SumConstants& constants) {
        if ((KEY_BITS != 3 || whole_fields) && block % KEY_PLANES == 0) {
            load = load_shared_16(keys.at + block / KEY_PLANES * LOAD_BYTES + lane * 16);
            if constexpr (looked_up) {
                constexpr bool sorted = !QUERY_MIXES_PLANES<false>;
                level_bytes<KEY_LEVEL_BITS, KEY_SKETCHED, sorted>(levels[0], load.x, constants.level_tables);
                level_bytes<KEY_LEVEL_BITS, KEY_SKETCHED, sorted>(levels[1], load.y, constants.level_tables);
                level_bytes<KEY_LEVEL_BITS, KEY_SKETCHED, sorted>(levels[2], load.z, constants.level_tables);
                level_bytes<KEY_LEVEL_BITS, KEY_SKETCHED, sorted>(levels[3], load.w, constants.level_tables);
            }
        }
        if (has_tops && block % TOP_PLANES == 0) {
            top = load_shared_16(keys.tops + block / TOP_PLANES * LOAD_BYTES + lane * 16);
        }
        if constexpr (!whole_fields || KEY_LEVEL_BITS == 1 && KEY_SKETCHED) {
            // The top bit of fields, or the one below it, where it is at the top of their bytes.
            constexpr int bits = KEY_BITS == 3 ? 1 : KEY_BITS;
            constexpr u32 mask = SIGNS ? 0x80808080u : 0x40404040u;
            const uint4& from = KEY_BITS == 3 ? top : load;
            const int shift = 8 - bits * (block % (8 / bits) + 1);
            a[0] = from.x << shift & mask;
            a[1] = from.y << shift & mask;
            a[2] = from.z << shift & mask;
            a[3] = from.w << shift & mask;
        } else if constexpr (looked_up) {
#pragma unroll
            for (int r = 0; r < 4; r++) a[r] = levels[r][block % KEY_PLANES];
        } else if constexpr (KEY_BITS == 3) {
            three_bit_block(a, load, top, block);
#pragma unroll
            for (int r = 0; r < 4; r++) a[r] = KEY_LEVELS ? three_bit_levels(a[r]) : a[r];
        } else {
            key_block(a, load, block % KEY_PLANES, constants);
        }
    }
};

// Σ q · key of 16 tokens, of f16 keys: of tokens g and g + 8 by the lane's heads.
__device__ __forceinline__ void sum_halves(float (&sums)[2 * LANE_HEADS], const PassLoads& keys, int m, int lane,
                                           const LaneQuery& query) {
    float products[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int f = 0; f < KEY_BLOCKS; f++) {
        const uint4 load = load_key_halves(keys.at + m * (KEY_BLOCKS * LOAD_BYTES), f, lane);
        const u32 a[4] = {load.x, load.y, load.z, load.w};
        multiply_f16(products, a, query.fragments[2 * f], query.fragments[2 * f + 1]);
        if (WIDE) multiply_f16(products, a, query.low(2 * f), query.low(2 * f + 1));
    }
#pragma unroll
    for (int i = 0; i < 2 * LANE_HEADS; i++) sums[i] = WIDE ? products[i] : products[2 * i % 4] + products[(2 * i + 1) % 4];
}

// Σ q16 · byte of packed keys, with SUM_START added.
template <bool SIGNS>
__device__ __forceinline__ void sum_bytes(float (&sums)[2 * LANE_HEADS], KeyWords<SIGNS>& words, const PassLoads& keys,
                                          int m, int lane, const LaneQuery& query, const SumConstants& constants) {
    constexpr bool is_signed = KeyWords<SIGNS>::is_signed;
    constexpr int zeros[4] = {0, 0, 0, 0};
    int high[4];
    int low[4];
#pragma unroll
    for (int f = 0; f < KEY_BLOCKS; f++) {
        u32 a[4];
        words.next_block(a, keys, m * KEY_BLOCKS + f, lane, constants);
        multiply_bytes<is_signed>(high, a, query.fragments[2 * f], query.fragments[2 * f + 1],
                                  f > 0 ? high : WIDE && KEY_SUMS_FIT ? zeros : constants.key_start);
        if (WIDE) {
            multiply_bytes<is_signed>(low, a, query.low(2 * f), query.low(2 * f + 1), f > 0 ? low : constants.key_start);
        }
    }
    // 256 · high is exact. The start value of the low sum is part of `base`.
#pragma unroll
    for (int i = 0; i < 2 * LANE_HEADS; i++) {
        const int h = WIDE ? high[i] : high[2 * i % 4];
        const int l = WIDE ? low[i] : high[(2 * i + 1) % 4];
        if (KEY_SUMS_FIT) {
            sums[i] = __int_as_float(256 * h + l);
        } else {
            sums[i] = __fadd_rn(__fmaf_rn(__int_as_float(h), 256.0f, -256.0f * SUM_START_FLOAT), __int_as_float(l));
        }
    }
}

// δ · Σ q · key of a pass, plus `base` of this lane's heads, for codes or for the signs of a sketch.
template <bool SIGNS>
__device__ __forceinline__ void pass_scores(float (&scores)[PASS_SCORES], const PassLoads& keys, int lane,
                                            const LaneQuery& query, const SumConstants& constants) {
    KeyWords<SIGNS> words;
#pragma unroll
    for (int m = 0; m < PASS_BLOCKS; m++) {
        float sums[2 * LANE_HEADS];
        if constexpr (KEY_BITS == 16) {
            sum_halves(sums, keys, m, lane, query);
        } else {
            sum_bytes(sums, words, keys, m, lane, query, constants);
        }
#pragma unroll
        for (int i = 0; i < 2 * LANE_HEADS; i++) {
            const int h = i % LANE_HEADS;
            scores[2 * m * LANE_HEADS + i] = __fmaf_rn(sums[i], query.delta[h], query.base[m % KEY_VARIANTS][h]);
        }
    }
}

// Scores of keys with a range per token, or with norms: `ranges` are those of the pass.
__device__ __forceinline__ void pass_scores_of_tokens(float (&scores)[PASS_SCORES], const PassLoads& keys, u32 ranges,
                                                      int lane, const LaneQuery (&queries)[KEY_QUERIES],
                                                      const SumConstants& constants) {
    constexpr bool two = KEY_QUERIES == 2;
    const LaneQuery& query = queries[0];
    pass_scores<SIGNS_ALONE>(scores, keys, lane, query, constants);
    float of_signs[PASS_SCORES];
    if constexpr (two) pass_scores<true>(of_signs, keys, lane, queries[1], constants);
#pragma unroll
    for (int i = 0; i < 2 * PASS_BLOCKS; i++) {
        const u32 range = load_shared_4(ranges + 4 * (8 * i + (lane >> 2)));
        const float scale = half_value(SIGNS_ALONE ? range >> 16 : range & 0xffffu);
        const float second = half_value(range >> 16);
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) {
            float& score = scores[i * LANE_HEADS + h];
            score *= scale;
            if constexpr (two) score = __fmaf_rn(second, of_signs[i * LANE_HEADS + h], score);
            if constexpr (!KEY_NORMS) score += second * query.sum[h];
        }
    }
}
