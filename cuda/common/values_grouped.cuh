// Weighted values of one pass of a warp where ranges of values change inside rows. Codes are multiplied as halves
// (m16n8k16) like keys in common/scores_grouped.cuh. Weights are halves.
//
//   groups of channels of a token:   Σ_t p_t v_tc = 2^24 Σ_t (p_t s_tj) code + Σ_t p_t m_tj
//   groups of tokens of a channel:   Σ_t p_t v_tc = Σ_G (s_Gc 2^24 Σ_{t in G} p_t code + m_Gc Σ_{t in G} p_t)
//
// Weights of a pass are 2^k times those relative to its own largest, with the largest k ≤ 15 for which no p s
// overflows. The result of a pass is scaled before it is added. Sums of p_t m_tj are one MMA for 16 tokens, whose rows
// are groups j.

#pragma once

constexpr bool VALUE_TOKEN_GROUPS = VALUE_GROUPED && VALUE_GROUP_CHANNELS == 1;
constexpr bool VALUE_CHANNEL_GROUPS = VALUE_GROUPED && !VALUE_TOKEN_GROUPS;

// Rows of MMAs that sum the minimums of groups of channels, at least one.
constexpr int VALUE_MINIMUM_BLOCKS = (VALUE_ROW_GROUPS + 15) / 16;

// The codes of tokens 2 c and 2 c + 1 (and of those 8 later) of one half of a run and one plane of a word, as halves.
__device__ __forceinline__ u32 value_pair(u32 word, int plane, int half) {
    constexpr u32 mask = ((1u << (VALUE_BITS % 16)) - 1u) * 0x00010001u;
    const u32 codes = half ? word >> 8 : word;
    // Codes of 3 bits are already bytes.
    const int shift = VALUE_BITS == 3 ? 0 : VALUE_BITS * plane;
    return VALUE_PLANE_FIXED ? codes & mask << shift : codes >> shift & mask;
}

// `k` for ranges of a pass, rows of STEP_TOKENS tokens.
__device__ __forceinline__ int weight_exponent(u32 ranges, int lane) {
    if (VALUE_TOKEN_GROUPS) return 14;
    constexpr int row_loads = PASS_TOKENS / 4;
    constexpr int loads = VALUE_ROW_GROUPS * row_loads;
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < (loads + 31) / 32; i++) {
        const int load = (i * 32 + lane) % loads;
        const uint4 words = load_shared_16(ranges + load / row_loads * (STEP_TOKENS * 4) + load % row_loads * 16);
        most = max_pair(most, max_pair(max_pair(words.x, words.y), max_pair(words.z, words.w)));
    }
    // Scales are not negative, so their bits are ordered like their values.
    const int exponent = (int)(__reduce_max_sync(ALL_LANES, most & 0xffffu) >> 10) - 15;
    return min(14 - exponent, 15);
}

// Σ p m of the pass: `sums` of groups 16 q + g and 16 q + g + 8 by heads.
__device__ __forceinline__ void pass_minimums(float (&sums)[VALUE_MINIMUM_BLOCKS][4], u32 ranges, int lane,
                                              const u32 (&weights)[PASS_BLOCKS][2]) {
#pragma unroll
    for (int q = 0; q < VALUE_MINIMUM_BLOCKS; q++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[q][i] = 0.0f;
        // Rows beyond the last group are not used.
        const int first = 16 * q + (lane >> 2);
        const u32 low_row = ranges + (first % VALUE_ROW_GROUPS * STEP_TOKENS + 2 * (lane & 3)) * 4;
        const u32 high_row = ranges + ((first + 8) % VALUE_ROW_GROUPS * STEP_TOKENS + 2 * (lane & 3)) * 4;
#pragma unroll
        for (int m = 0; m < PASS_BLOCKS; m++) {
            u32 a[4] = {0u, 0u, 0u, 0u};
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint2 low = load_shared_8(low_row + (16 * m + 8 * r) * 4);
                a[2 * r] = permute_bytes(low.x, low.y, 0x7632u);
                if (VALUE_ROW_GROUPS > 16 * q + 8) {
                    const uint2 high = load_shared_8(high_row + (16 * m + 8 * r) * 4);
                    a[2 * r + 1] = permute_bytes(high.x, high.y, 0x7632u);
                }
            }
            multiply_f16(sums[q], a, weights[m][0], weights[m][1]);
        }
    }
}

// Adds factor[h] · Σ p v to the sums; for groups of channels without the minimums. `weights` are B fragments of 16
// tokens each.
__device__ __forceinline__ void pass_pairs(float (&sums)[VALUE_BLOCKS][4], const PassLoads& values, u32 ranges, int lane,
                                           const u32 (&weights)[PASS_BLOCKS][2], const float (&factor)[LANE_HEADS]) {
    // As in `pass_bytes`.
    constexpr int groups = VALUE_PLANE_FIXED ? VALUE_BLOCKS / VALUE_PLANES : 1;
    constexpr int group_blocks = VALUE_BLOCKS / groups;
    constexpr int group_loads = PASS_VALUE_LOADS / groups;
    constexpr int channels = VALUE_CHANNEL_GROUPS ? VALUE_GROUP_CHANNELS : HEAD_DIM;
    constexpr int fold_tokens = VALUE_TOKEN_GROUPS && VALUE_GROUP_TOKENS < PASS_TOKENS ? VALUE_GROUP_TOKENS : PASS_TOKENS;
    constexpr int fold_blocks = fold_tokens / BLOCK_TOKENS;
    const int g = lane >> 2;
    const int c = lane & 3;
#pragma unroll
    for (int group = 0; group < groups; group++) {
        uint4 loads[group_loads];
#pragma unroll
        for (int i = 0; i < group_loads; i++) {
            loads[i] = load_shared_16(values.at + (i * groups + group) * LOAD_BYTES + lane * 16);
        }
        uint4 tops[VALUE_GROUP_TOPS];
        load_value_tops(tops, values, group * group_blocks, lane);
        const int first_channel = group * group_blocks * 16;
#pragma unroll
        for (int fold = 0; fold < PASS_BLOCKS / fold_blocks; fold++) {
            float products[group_blocks][4];
#pragma unroll
            for (int i = 0; i < 4 * group_blocks; i++) products[i / 4][i % 4] = 0.0f;
            float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int m = fold * fold_blocks; m < (fold + 1) * fold_blocks; m++) {
                if (VALUE_TOKEN_GROUPS) {
                    constexpr u32 ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
                    multiply_f16(total, ones, weights[m][0], weights[m][1]);
                }
#pragma unroll
                for (int j = first_channel / channels; j <= (first_channel + 16 * group_blocks - 1) / channels; j++) {
                    u32 b[2] = {weights[m][0], weights[m][1]};
                    if (VALUE_CHANNEL_GROUPS) {
#pragma unroll
                        for (int r = 0; r < 2; r++) {
                            const uint2 words = load_shared_8(ranges + (j * STEP_TOKENS + 16 * m + 8 * r + 2 * c) * 4);
                            b[r] = multiply_pair(b[r], permute_bytes(words.x, words.y, 0x5410u));
                        }
                    }
#pragma unroll
                    for (int n = 0; n < group_blocks; n++) {
                        const int channel = first_channel + 16 * n;
                        if (channel + 15 < j * channels || channel >= (j + 1) * channels) continue;
                        const bool whole = channel >= j * channels && channel + 15 < (j + 1) * channels;
                        const int index = m / 2 * group_blocks + n;
                        const uint4& load = loads[index / VALUE_PLANES];
                        u32 words[4] = {load.x, load.y, load.z, load.w};
                        if (VALUE_BITS == 3) three_bit_values(words, load, tops, m / 2, group * group_blocks + n);
                        u32 a[4];
#pragma unroll
                        for (int r = 0; r < 4; r++) {
                            a[r] = value_pair(words[r], index % VALUE_PLANES, m % 2);
                            const int row = channel + g + 8 * (r % 2);
                            if (!whole && (row < j * channels || row >= (j + 1) * channels)) a[r] = 0u;
                        }
                        multiply_f16(products[n], a, b[0], b[1]);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < group_blocks; n++) {
                const int block = group * group_blocks + n;
#pragma unroll
                for (int i = 0; i < 2 * LANE_HEADS; i++) {
                    const int at = WIDE ? i : 2 * i;
                    float& sum = sums[block][at];
                    float product = products[n][at];
                    if (VALUE_TOKEN_GROUPS) {
                        const int row = 16 * block + g + 8 * (i / LANE_HEADS);
                        const u32 range = load_shared_4(ranges + (fold * HEAD_DIM + row) * 4);
                        const float scale = half_value(range & 0xffffu) * value_unit(block);
                        product = __fmaf_rn(product, scale, half_value(range >> 16) * total[at]);
                    }
                    sum = __fmaf_rn(product, factor[i % LANE_HEADS], sum);
                }
            }
        }
    }
}
