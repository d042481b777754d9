// Weights of the attention states of one query head over several parts of its tokens.
//
//   out = Σ_p exp(lse_p − M) out_p / Σ_p exp(lse_p − M),  lse = M + ln Σ_p exp(lse_p − M),  M = max_p lse_p
//
// Parts count in their order, so that everyone who merges the same parts gets the same bits. A part with a log-sum-exp
// of −∞ is empty: it has no weight, and its output may be NaN.

#pragma once

#include "common/reduce.cuh"

constexpr u32 MINUS_INFINITY = 0xff800000u;

__device__ __forceinline__ bool is_empty(float lse) { return __float_as_uint(lse) == MINUS_INFINITY; }

// The weight of a part. `largest` is the largest log-sum-exp of all parts.
__device__ __forceinline__ float part_weight(float lse, float largest) {
    return is_empty(lse) ? 0.0f : expf(lse - largest);
}

// What a part adds to an output.
__device__ __forceinline__ float weighted(float weight, float out) { return weight == 0.0f ? 0.0f : weight * out; }

__device__ __forceinline__ float merged_output(float sum, float weights) { return weights == 0.0f ? 0.0f : sum / weights; }

__device__ __forceinline__ float merged_lse(float largest, float weights) {
    return is_empty(largest) ? largest : largest + logf(weights);
}
