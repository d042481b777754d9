// token_scores: scores the tokens of every KV head by their column sums, so that the best tokens are those that stay.
//
//   sum_t is the largest of a group of heads;  w_t = sum_t, or sum_t / (rows that see t);  p_t = mean or maximum of w over the pooled tokens around t, but for recent ones
//   score_t = +inf of what stays in any case; at most 0 of images where text is raised, in the order of p_t; else p_t
//
// One block owns TILE tokens of a head. If text is raised, the block first searches all tokens of the head for the
// largest value. Sums are read from the cache once per pooled token, and scores are written coalesced. For a NaN sum
// the kernel keeps the largest distance of such a token from the end. An integer maximum is the same in every run.
//
// In bounds: tokens are below `tokens`, neighbours between 0 and the first recent one; sums, scores and words were
// checked against the call. WEIGHING is 0 sum, 1 mean of the rows that see a token; POOL 0 none, 1 mean, 2 maximum;
// TEXT 0 like images, 1 raised, 2 stays; GROUP sums of a token of a KV head.

#pragma once

#include "common/reduce.cuh"

struct TokenScoresCall {
    // [kv_head][GROUP][tokens].
    u64 sums;
    // [kv_head][tokens].
    u64 scores;
    // Positions of the rows, ascending; where images begin and end, ascending.
    u64 rows;
    u64 boundaries;
    // [kv_head]
    u64 not_numbers;
    u32 tokens;
    u32 row_count;
    u32 boundary_count;
    // The first of the recent tokens.
    u32 recent_from;
    // Tokens pooled on either side.
    u32 half_width;
    u32 unused;
};

constexpr u32 THREADS = 256;
constexpr u32 TILE = 8 * THREADS;
constexpr u32 INFINITE = 0x7f800000u;

// The number of ascending values below `value`.
__device__ __forceinline__ u32 count_below(const u32* values, u32 count, u32 value) {
    u32 first = 0;
    while (count > 0) {
        const u32 half = count / 2;
        if (values[first + half] < value) {
            first += half + 1;
            count -= half + 1;
        } else {
            count = half;
        }
    }
    return first;
}

// The largest sum of a token, or NaN if one is.
__device__ __forceinline__ float sum_of(const TokenScoresCall& call, const float* sums, u32 token) {
    float sum = sums[token];
#pragma unroll
    for (u32 head = 1; head < GROUP; head++) {
        sum = larger(sum, sums[(u64)head * call.tokens + token]);
    }
    return sum;
}

__device__ __forceinline__ float weighed(const TokenScoresCall& call, const float* sums, u32 token) {
    if (WEIGHING == 0) return sum_of(call, sums, token);
    const u32 seen_by = call.row_count - count_below((const u32*)call.rows, call.row_count, token);
    return seen_by == 0 ? 0.0f : sum_of(call, sums, token) / (float)seen_by;
}

__device__ __forceinline__ float pooled(const TokenScoresCall& call, const float* sums, u32 token) {
    if (POOL == 0 || token >= call.recent_from) return weighed(call, sums, token);
    const u32 first = token - min(token, call.half_width);
    const u32 end = min(token + call.half_width + 1, call.recent_from);
    float all = POOL == 1 ? 0.0f : -__uint_as_float(INFINITE);
    for (u32 near = first; near < end; near++) {
        const float x = weighed(call, sums, near);
        all = POOL == 1 ? all + x : fmaxf(all, x);
    }
    return POOL == 1 ? all / (float)(2 * call.half_width + 1) : all;
}

// The score of an image where text is raised: 0 for the largest score of all, and less in the order of the
// others. Adding the largest to text would round its score. NaN stays NaN.
__device__ __forceinline__ float lowered(float score, float largest) {
    if (score != score) return score;
    // Bits ascend with numbers from 0 on, and descend with negative ones.
    return score >= largest ? 0.0f : __uint_as_float(0xff7fffffu - (u32)max(__float_as_int(score), 0));
}

extern "C" __global__ void __launch_bounds__(THREADS) token_scores(const TokenScoresCall call) {
    __shared__ float of_warps[THREADS / 32];
    const u32 kv_head = blockIdx.y;
    const float* sums = (const float*)call.sums + (u64)kv_head * GROUP * call.tokens;
    float* scores = (float*)call.scores + (u64)kv_head * call.tokens;
    float largest = -__uint_as_float(INFINITE);
    if (TEXT == 1) {
#pragma unroll 8
        for (u32 token = threadIdx.x; token < call.tokens; token += THREADS) {
            largest = fmaxf(largest, pooled(call, sums, token));
        }
        largest = warp_max(largest);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
        __syncthreads();
#pragma unroll
        for (u32 warp = 0; warp < THREADS / 32; warp++) largest = fmaxf(largest, of_warps[warp]);
    }
    const u32 first = blockIdx.x * TILE + threadIdx.x;
#pragma unroll
    for (u32 token = first; token < first + TILE; token += THREADS) {
        if (token >= call.tokens) break;
        const float sum = sum_of(call, sums, token);
        if (sum != sum) atomicMax((u32*)call.not_numbers + kv_head, call.tokens - token);
        float score = pooled(call, sums, token);
        bool stays = token >= call.recent_from;
        if (TEXT != 0) {
            const bool text = count_below((const u32*)call.boundaries, call.boundary_count, token + 1) % 2 == 0;
            stays = stays || (TEXT == 2 && text);
            if (TEXT == 1 && !text) score = lowered(score, largest);
        }
        scores[token] = stays ? __uint_as_float(INFINITE) : score;
    }
}
