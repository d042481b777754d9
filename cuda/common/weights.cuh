// From the scores of a pass of a warp to weights, and to weighted values.

#pragma once

#include "common/reduce.cuh"

// The sums of a warp so far. Weights are 2^(score − reference). A lane holds its own tokens' part of weight and
// minimum, and the sums of its own channels.
struct WarpSums {
    float reference[LANE_HEADS];
    float weight[LANE_HEADS];
    // Σ weight · minimum of the token, if values have a range per token.
    float minimum[LANE_HEADS];
    // Products of the MMA: rows g and g + 8 of each block of channels, by heads.
    float values[VALUE_BLOCKS][4];
    // Σ weight · minimum of groups g and g + 8 of each 16 groups of channels, by heads.
    float minimums[VALUE_MINIMUM_BLOCKS][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) {
            reference[h] = -__int_as_float(0x7f800000);
            weight[h] = 0.0f;
            minimum[h] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < VALUE_BLOCKS; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) values[n][i] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 4 * VALUE_MINIMUM_BLOCKS; i++) minimums[i / 4][i % 4] = 0.0f;
    }

    // Moves to a new reference, which is at least as large as the previous one.
    __device__ __forceinline__ void refer(int h, float to) {
        const float factor = exp2_approx(reference[h] - to);
        reference[h] = to;
        weight[h] *= factor;
        minimum[h] *= factor;
#pragma unroll
        for (int n = 0; n < VALUE_BLOCKS; n++) {
            values[n][WIDE ? h : 0] *= factor;
            values[n][WIDE ? 2 + h : 2] *= factor;
        }
#pragma unroll
        for (int q = 0; q < VALUE_MINIMUM_BLOCKS; q++) {
            minimums[q][WIDE ? h : 0] *= factor;
            minimums[q][WIDE ? 2 + h : 2] *= factor;
        }
    }
};

__device__ __forceinline__ void largest_of_lane(float (&largest)[LANE_HEADS], const float (&x)[PASS_SCORES]) {
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) {
        largest[h] = x[h];
#pragma unroll
        for (int i = 1; i < PASS_SCORES / LANE_HEADS; i++) largest[h] = fmaxf(largest[h], x[i * LANE_HEADS + h]);
    }
}

// f16 values. Weights are halves up to 2^15. A pass with a larger one moves the reference by whole powers of two, and
// hence exactly, so that its largest is at most 2^6; 2^-14 still has full precision.
constexpr float MOST = 15.0f;
constexpr float START = 6.0f;

__device__ __forceinline__ void attend_halves(WarpSums& sums, const float (&scores)[PASS_SCORES], u32 values, int lane) {
    float largest[LANE_HEADS];
    largest_of_lane(largest, scores);
    bool far = largest[0] - sums.reference[0] > MOST;
    if (WIDE) far = far || largest[LANE_HEADS - 1] - sums.reference[LANE_HEADS - 1] > MOST;
    if (__any_sync(ALL_LANES, far)) {
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) {
            sums.refer(h, fmaxf(sums.reference[h], ceilf(max_of_tokens(largest[h]) - START)));
        }
    }
    u32 weights[PASS_BLOCKS][2];
#pragma unroll
    for (int i = 0; i < 2 * PASS_BLOCKS; i++) {
        float p[2] = {0.0f, 0.0f};
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) p[h] = exp2_approx(scores[i * LANE_HEADS + h] - sums.reference[h]);
        const u32 pair = half_pair(p[0], p[1]);
        // The rounding of the weights must not shift the common part of all values.
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) sums.weight[h] += half_value(h == 0 ? pair & 0xffffu : pair >> 16);
        weights[i / 2][i % 2] = transpose_8x8(pair);
    }
    pass_halves(sums.values, values, lane, weights);
}

// Packed values. Weights are integers of 16 bits relative to the largest of the pass, and the result of a pass is
// scaled before it is added: a token that outweighs all others makes only its own pass coarse. References move rarely,
// since floats can hold numbers far above them.
constexpr float FAR = 64.0f;
constexpr float LARGEST_WEIGHT = 65535.0f;
constexpr float MIDDLE_VALUE =
    VALUE_BITS == 16 ? 0.0f : VALUE_LEVELS ? -0.5f : ((1 << (VALUE_BITS % 16)) - 1) * 0.5f;

// The largest scores of a pass, after which the reference is close enough, and the factors that relate them to it.
__device__ __forceinline__ void pass_tops(WarpSums& sums, const float (&scores)[PASS_SCORES], float (&top)[LANE_HEADS],
                                          float (&factor)[LANE_HEADS]) {
    largest_of_lane(top, scores);
    bool far = false;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) {
        top[h] = LONE_HEAD ? max_of_warp(top[h]) : max_of_tokens(top[h]);
        far = far || top[h] > sums.reference[h] + FAR;
    }
    if (__any_sync(ALL_LANES, far)) {
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) sums.refer(h, fmaxf(sums.reference[h], top[h]));
    }
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) factor[h] = exp2_approx(top[h] - sums.reference[h]);
}

__device__ __forceinline__ void attend_bytes(WarpSums& sums, float (&scores)[PASS_SCORES], const PassLoads& values,
                                             u32 ranges, int lane, const SumConstants& constants) {
    float top[LANE_HEADS];
    float factor[LANE_HEADS];
    pass_tops(sums, scores, top, factor);
#pragma unroll
    for (int i = 0; i < PASS_SCORES; i++) scores[i] = exp2_approx(scores[i] - top[i % LANE_HEADS]);

    // If values have a range per token, its scale is part of the weight. Scales are 0 or at least 2^-14.
    float scale[LANE_HEADS];
    float scaled_sum[LANE_HEADS];
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) {
        scale[h] = LARGEST_WEIGHT;
        scaled_sum[h] = 0.0f;
    }
    if (VALUE_TOKEN_RANGES) {
        float sum[LANE_HEADS];
        float minimum[LANE_HEADS];
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) {
            sum[h] = 0.0f;
            minimum[h] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 2 * PASS_BLOCKS; i++) {
            const u32 range = load_shared_4(ranges + 4 * (8 * i + (lane >> 2)));
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++) {
                float& p = scores[i * LANE_HEADS + h];
                sum[h] += p;
                if (VALUE_LEVEL_UNIT == 0) minimum[h] = __fmaf_rn(p, half_value(range >> 16), minimum[h]);
                p *= half_value(range & 0xffffu);
                scaled_sum[h] += p;
            }
        }
        float largest[LANE_HEADS];
        largest_of_lane(largest, scores);
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) {
            sums.weight[h] = __fmaf_rn(factor[h], sum[h], sums.weight[h]);
            // Levels of a codebook are symmetric about 0: their middle compensates for the offset of their bytes.
            if (VALUE_LEVEL_UNIT == 0) {
                const float middle = __fmaf_rn(MIDDLE_VALUE, scaled_sum[h], minimum[h]);
                sums.minimum[h] = __fmaf_rn(factor[h], middle, sums.minimum[h]);
            }
            const float most = fmaxf(max_of_tokens(largest[h]), 1e-30f);
            scale[h] = __fdividef(LARGEST_WEIGHT, most);
            factor[h] *= most;
        }
    }
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) factor[h] *= 1.0f / LARGEST_WEIGHT;

    u32 integers[PASS_SCORES];
    u32 total[LANE_HEADS];
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) total[h] = PASS_SCORES / LANE_HEADS * (0u - __float_as_uint(INTEGER_START_FLOAT));
#pragma unroll
    for (int i = 0; i < PASS_SCORES; i++) {
        integers[i] = __float_as_uint(__fmaf_rn(scores[i], scale[i % LANE_HEADS], INTEGER_START_FLOAT));
        total[i % LANE_HEADS] += integers[i];
    }
    // Totals are sums of the rounded weights, so that rounding does not shift the common part of all codes. If scales
    // differ, the middle code compensates.
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) {
        float& sum = VALUE_TOKEN_RANGES ? sums.minimum[h] : sums.weight[h];
        sum = __fmaf_rn((float)(int)total[h], VALUE_TOKEN_RANGES ? -MIDDLE_VALUE * factor[h] : factor[h], sum);
    }
    u32 weights[WEIGHT_PARTS][PASS_RUNS][2];
    weight_fragments(weights, integers);
    pass_bytes(sums.values, values, lane, weights, factor, constants);
}

// Packed values with ranges of groups: `ranges` are those of the pass.
__device__ __forceinline__ void attend_pairs(WarpSums& sums, const float (&scores)[PASS_SCORES], const PassLoads& values,
                                             u32 ranges, int lane) {
    float top[LANE_HEADS];
    float factor[LANE_HEADS];
    pass_tops(sums, scores, top, factor);
    const int exponent = weight_exponent(ranges, lane);
    const float unit = __int_as_float((127 - exponent) << 23);
    float weight[LANE_HEADS];
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) {
        top[h] -= (float)exponent;
        factor[h] *= unit;
        weight[h] = 0.0f;
    }
    u32 weights[PASS_BLOCKS][2];
#pragma unroll
    for (int i = 0; i < 2 * PASS_BLOCKS; i++) {
        float p[2] = {0.0f, 0.0f};
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) p[h] = exp2_approx(scores[i * LANE_HEADS + h] - top[h]);
        const u32 pair = half_pair(p[0], p[1]);
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) weight[h] += half_value(h == 0 ? pair & 0xffffu : pair >> 16);
        weights[i / 2][i % 2] = transpose_8x8(pair);
    }
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) sums.weight[h] = __fmaf_rn(factor[h], weight[h], sums.weight[h]);
    if (VALUE_CHANNEL_GROUPS) {
        float minimums[VALUE_MINIMUM_BLOCKS][4];
        pass_minimums(minimums, ranges, lane, weights);
#pragma unroll
        for (int q = 0; q < VALUE_MINIMUM_BLOCKS; q++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums.minimums[q][i] = __fmaf_rn(minimums[q][i], factor[WIDE ? i % LANE_HEADS : 0], sums.minimums[q][i]);
            }
        }
    }
    pass_pairs(sums.values, values, ranges, lane, weights, factor);
}
