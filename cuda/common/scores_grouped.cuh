// Scores of one pass of a warp where ranges of keys change inside rows. Codes are multiplied as halves (m16n8k16):
// masked in place, they are the exact subnormals code · 2^(shift − 24).
//
//   groups of tokens of a channel:   score = δ (2^24 Σ_c (q_c s_c) code + Σ_c q_c m_c)
//   groups of channels of a token:   score = Σ_j (s_j δ 2^24 Σ_{c in j} q_c code + m_j Σ_{c in j} q'_c)
//
// with (s, m) a range. A product q_c s_c is split into two halves that sum to it, and so is the query: the common part
// of a group's codes carries no rounding error. Σ_c q_c m_c is multiplied from eight identical rows, once per group.

#pragma once

#include "common/pairs.cuh"

constexpr float KEY_PAIR_UNIT = 16777216.0f;

// A lane's sums of rows g and g + 8 by heads, of high and low parts.
__device__ __forceinline__ float joined_halves(const float (&products)[4], int i) {
    return WIDE ? products[i] : products[2 * i % 4] + products[(2 * i + 1) % 4];
}

// Groups of tokens: `ranges` are those of the pass, [group][channel].
__device__ __forceinline__ void pass_scores_of_token_groups(float (&scores)[PASS_SCORES], const PassLoads& keys,
                                                            u32 ranges, int lane,
                                                            const LaneQuery& query) {
    constexpr bool several = KEY_GROUP_TOKENS > 0 && KEY_GROUP_TOKENS < PASS_TOKENS;
    constexpr int group_tokens = several ? KEY_GROUP_TOKENS : PASS_TOKENS;
    constexpr int group_blocks = group_tokens / BLOCK_TOKENS;
    uint4 load;
    uint4 top;
#pragma unroll
    for (int group = 0; group < PASS_TOKENS / group_tokens; group++) {
        u32 scaled[2 * QUERY_REGISTERS];
        float start[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int f = 0; f < QUERY_BLOCKS; f++) {
            const uint4 words = load_shared_16(ranges + (group * HEAD_DIM + 16 * f + 4 * (lane & 3)) * 4);
            const u32 scales[2] = {permute_bytes(words.x, words.z, 0x5410u), permute_bytes(words.y, words.w, 0x5410u)};
            const u32 a[4] = {permute_bytes(words.x, words.z, 0x7632u), 0u, permute_bytes(words.y, words.w, 0x7632u), 0u};
            const int other = QUERY_BLOCKS + f;
            multiply_f16(start, a, query.fragments[2 * f], query.fragments[2 * f + 1]);
            if (WIDE) multiply_f16(start, a, query.fragments[2 * other], query.fragments[2 * other + 1]);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                // The rounding error of the high part goes to the low one. If both are columns of one fragment, the
                // lanes of high ones have zeros as `other`.
                const u32 high_query = query.fragments[2 * (WIDE ? f : other) + r];
                const u32 high = multiply_pair(high_query, scales[r]);
                const u32 left = multiply_subtract_pair(high_query, scales[r], high);
                if (WIDE) scaled[2 * f + r] = high;
                const int low = 2 * (WIDE ? other : f) + r;
                scaled[low] = multiply_add_pair(query.fragments[low], scales[r], left);
            }
        }
#pragma unroll
        for (int m = group * group_blocks; m < (group + 1) * group_blocks; m++) {
            float products[KEY_HALF_PLANES][4];
#pragma unroll
            for (int i = 0; i < 4 * KEY_HALF_PLANES; i++) products[i / 4][i % 4] = 0.0f;
#pragma unroll
            for (int f = 0; f < KEY_BLOCKS; f++) {
                const int block = m * KEY_BLOCKS + f;
                const int plane = block % KEY_PLANES;
                if (plane == 0) load = load_shared_16(keys.at + block / KEY_PLANES * LOAD_BYTES + lane * 16);
                if (KEY_BITS == 3 && block % TOP_PLANES == 0) {
                    top = load_shared_16(keys.tops + block / TOP_PLANES * LOAD_BYTES + lane * 16);
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 a[4];
                    key_pairs(a, load, top, block, half, false);
                    const int at = 2 * (2 * f + half);
                    float(&sum)[4] = products[plane % KEY_HALF_PLANES];
                    multiply_f16(sum, a, scaled[at], scaled[at + 1]);
                    if (WIDE) multiply_f16(sum, a, scaled[2 * QUERY_BLOCKS + at], scaled[2 * QUERY_BLOCKS + at + 1]);
                }
            }
#pragma unroll
            for (int i = 0; i < 2 * LANE_HEADS; i++) {
                float sum = joined_halves(start, i % LANE_HEADS);
#pragma unroll
                for (int p = 0; p < KEY_HALF_PLANES; p++) {
                    const float unit = KEY_PAIR_UNIT / (float)(1 << (KEY_PLANE_SHIFT * p));
                    sum = __fmaf_rn(joined_halves(products[p], i), unit, sum);
                }
                scores[2 * m * LANE_HEADS + i] = sum * query.delta[i % LANE_HEADS];
            }
        }
    }
}

// Groups of channels: `ranges` are those of the pass, rows of STEP_TOKENS tokens; `group_sums` is the address of those
// of the query. If a group is not a whole block, the query counts as zero beyond it.
__device__ __forceinline__ void pass_scores_of_channel_groups(float (&scores)[PASS_SCORES], const PassLoads& keys,
                                                              u32 ranges, int lane,
                                                              const LaneQuery& query, u32 group_sums) {
    constexpr int channels = KEY_GROUP_CHANNELS > 1 ? KEY_GROUP_CHANNELS : HEAD_DIM;
    const int g = lane >> 2;
    const int c = lane & 3;
    uint4 loads[PASS_KEY_LOADS];
#pragma unroll
    for (int i = 0; i < PASS_KEY_LOADS; i++) loads[i] = load_shared_16(keys.at + i * LOAD_BYTES + lane * 16);
    uint4 tops[PASS_KEY_TOPS + 1];
#pragma unroll
    for (int i = 0; i < PASS_KEY_TOPS; i++) tops[i] = load_shared_16(keys.tops + i * LOAD_BYTES + lane * 16);
#pragma unroll
    for (int i = 0; i < PASS_SCORES; i++) scores[i] = 0.0f;
#pragma unroll
    for (int group = 0; group < KEY_ROW_GROUPS; group++) {
        float sums[LANE_HEADS];
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) {
            const u32 word = load_shared_4(group_sums + (group * WARP_HEADS + LANE_HEADS * c + h) * 4);
            sums[h] = __uint_as_float(word);
        }
#pragma unroll
        for (int m = 0; m < PASS_BLOCKS; m++) {
            float products[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int f = group * channels / 16; f <= ((group + 1) * channels - 1) / 16; f++) {
                const int block = m * KEY_BLOCKS + f / 2;
                u32 a[4];
                const uint4& top = tops[KEY_BITS == 3 ? block / TOP_PLANES : 0];
                key_pairs(a, loads[block / KEY_PLANES], top, block, f % 2, true);
                const int channel = 16 * f + 4 * c;
                const bool inside = channel >= group * channels && channel < (group + 1) * channels;
                const int other = QUERY_BLOCKS + f;
                multiply_f16(products, a, inside ? query.fragments[2 * f] : 0u, inside ? query.fragments[2 * f + 1] : 0u);
                if (WIDE) multiply_f16(products, a, inside ? query.fragments[2 * other] : 0u, inside ? query.fragments[2 * other + 1] : 0u);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 range = load_shared_4(ranges + (group * STEP_TOKENS + 16 * m + 8 * i + g) * 4);
                const float scale = half_value(range & 0xffffu) * KEY_PAIR_UNIT;
                const float minimum = half_value(range >> 16);
#pragma unroll
                for (int h = 0; h < LANE_HEADS; h++) {
                    float& score = scores[(2 * m + i) * LANE_HEADS + h];
                    const float product = joined_halves(products, i * LANE_HEADS + h) * query.delta[h];
                    score = __fmaf_rn(product, scale, __fmaf_rn(minimum, sums[h], score));
                }
            }
        }
    }
}
