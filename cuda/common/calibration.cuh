// CalibQuant's calibration of scores (arXiv 2502.14882, eq. 7): `format::Calibration`.
//
// A calibrated segment takes two launches of `attend` or `attend_run_pipelined`. The first only scores, and records the
// extremes of each head over the whole span by atomic maxima. The second scores again in the same way and maps the
// scores. Scores are not stored: at four heads, writing and reading a score again moves 32 bytes per token, as much as
// a 2-bit key.
//
//   score ↦ (γ − τ1) + slope · (score − γ),  slope = max(0, (δ − τ2 − (γ − τ1)) / (δ − γ + 1e-8 log2(e)))
//
// with γ and δ the smallest and the largest score, all of it times log2(e). A span of equal scores goes to γ − τ1.

#pragma once

#include "common/attend_call.cuh"
#include "common/ordered.cuh"

// SCORE_PASS 0: scores unchanged; 1: only their extremes; 2: scores mapped by them.
constexpr bool FINDS_EXTREMES = SCORE_PASS == 1;
constexpr bool MAPS_SCORES = SCORE_PASS == 2;

struct ScoreMap {
    float slope;
    // The smallest score, and the value that it is mapped to.
    float smallest;
    float low;

    __device__ __forceinline__ float operator()(float score) const {
        return __fmaf_rn(slope, score - smallest, low);
    }
};

// Ordered bits of the negated smallest score of a query head, and of its largest score, for the query at a place.
__device__ __forceinline__ u32* score_extremes(const AttendCall& call, u32 place, u32 head) {
    return call.extremes + 2 * ((u64)place * call.kv_heads * call.group + head);
}

__device__ __forceinline__ void enter_extremes(const AttendCall& call, u32 place, u32 head, float smallest,
                                               float largest) {
    u32* extremes = score_extremes(call, place, head);
    atomicMax(extremes, ordered_bits(-smallest));
    atomicMax(extremes + 1, ordered_bits(largest));
}

__device__ __forceinline__ ScoreMap score_map(const AttendCall& call, u32 place, u32 head) {
    const u32* extremes = score_extremes(call, place, head);
    const float smallest = -from_ordered(__ldcg(extremes));
    const float largest = from_ordered(__ldcg(extremes + 1));
    const float low = smallest - call.tau1;
    const float high = largest - call.tau2;
    const float slope = fmaxf(__fdiv_rn(high - low, largest - smallest + 1.442695e-8f), 0.0f);
    return {smallest == largest ? 0.0f : slope, smallest, low};
}
