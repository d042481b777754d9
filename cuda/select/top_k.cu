// top_k: the indices of the k largest scores of every KV head, ascending. Ties go to the lower indices.
//
// One block owns a head. Scores are mapped to integers of the same order (−0 equals +0, NaN lies below −∞). Three
// passes over the scores find the k-th largest integer digit by digit. Each pass builds a histogram of the next digit
// of the scores that agree with the digits found so far. Integer atomics give the same histogram in every order. Then
// each warp owns a contiguous range of scores and counts those above the k-th and those equal to it. A scan over the
// warps gives the place of its range in the result, and votes put each score in its place. Of the scores equal to the
// k-th, the first ones still needed are taken.
//
// After the first pass, as many scores as fit (`held`) stay in shared memory as integers. Only the others are read five
// times from memory. Exact for any k and n.
//
// In bounds: the grid has one block per head; scores and result were checked against n and k on the host, shared memory
// is made for `held` scores.

#pragma once

#include "common/ptx.cuh"

struct TopKCall {
    u64 scores;
    // [kv_head][k].
    u64 chosen;
    u32 n;
    u32 k;
    // Scores of a head that shared memory holds.
    u32 held;
    u32 unused;
};

constexpr u32 TOP_THREADS = 1024;
constexpr u32 TOP_WARPS = TOP_THREADS / 32;
// Scores that a thread reads at once.
constexpr u32 AHEAD = 8;
// The digits of a rank: 11, 11 and 10 bits.
constexpr u32 DIGIT_BITS = 11;
constexpr u32 BINS = 1 << DIGIT_BITS;

// A number that has the order of the scores.
__device__ __forceinline__ u32 rank_of(u32 bits) {
    const u32 magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0;
    if (magnitude == 0) return 0x80000000u;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Sums over the threads before this one; `of_warps` is shared.
__device__ __forceinline__ u32 sum_before(u32 own, u32* of_warps) {
    const u32 lane = threadIdx.x % 32;
    u32 sum = own;
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(ALL_LANES, sum, distance);
        if (lane >= distance) sum += other;
    }
    if (lane == 31) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    // Every warp adds those before it.
    const u32 others = __reduce_add_sync(ALL_LANES, lane < threadIdx.x / 32 ? of_warps[lane] : 0);
    __syncthreads();
    return others + sum - own;
}

extern "C" __global__ void __launch_bounds__(TOP_THREADS) top_k(const TopKCall call) {
    extern __shared__ u32 ranks[];
    __shared__ u32 histogram[BINS];
    __shared__ u32 of_warps[TOP_WARPS];
    __shared__ u32 tied_of_warps[TOP_WARPS];
    // The digit of the k-th score, and the number of scores with a larger digit.
    __shared__ uint2 found;
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    const u32* scores = (const u32*)call.scores + (u64)blockIdx.x * call.n;
    const auto rank_at = [&](u32 i) { return i < call.held ? ranks[i] : rank_of(scores[i]); };
    // The known digits of the k-th rank, and how many scores that agree with them are wanted.
    u32 known = 0;
    u32 mask = 0;
    u32 wanted = call.k;
    for (u32 pass = 0; pass < 3; pass++) {
        const u32 bits = pass == 2 ? 32 - 2 * DIGIT_BITS : DIGIT_BITS;
        const u32 shift = pass == 2 ? 0 : 32 - (pass + 1) * DIGIT_BITS;
        for (u32 i = threadIdx.x; i < BINS; i += TOP_THREADS) histogram[i] = 0;
        __syncthreads();
        for (u32 first = threadIdx.x; first < call.n + threadIdx.x; first += AHEAD * TOP_THREADS) {
            u32 ahead[AHEAD];
#pragma unroll
            for (u32 j = 0; j < AHEAD; j++) {
                const u32 i = first + j * TOP_THREADS;
                ahead[j] = i >= call.n ? 0 : pass == 0 ? rank_of(scores[i]) : rank_at(i);
            }
#pragma unroll
            for (u32 j = 0; j < AHEAD; j++) {
                const u32 i = first + j * TOP_THREADS;
                if (pass == 0 && i < min(call.n, call.held)) ranks[i] = ahead[j];
                if (i < call.n && (ahead[j] & mask) == known) {
                    atomicAdd(&histogram[ahead[j] >> shift & ((1u << bits) - 1)], 1u);
                }
            }
        }
        __syncthreads();
        // From the largest digit down. A thread owns two digits.
        const u32 high = BINS - 1 - 2 * threadIdx.x;
        const u32 counts[2] = {histogram[high], histogram[high - 1]};
        const u32 before = sum_before(counts[0] + counts[1], of_warps);
        if (before < wanted && wanted <= before + counts[0]) found = make_uint2(high, before);
        const u32 between = before + counts[0];
        if (between < wanted && wanted <= between + counts[1]) found = make_uint2(high - 1, between);
        __syncthreads();
        known |= found.x << shift;
        mask |= ((1u << bits) - 1) << shift;
        wanted -= found.y;
        // All threads have read `found` before it is written again, because the histogram is cleared and filled in
        // between.
    }

    const u32 run = (call.n + TOP_THREADS - 1) / TOP_THREADS * 32;
    const u32 start = min(warp * run, call.n);
    const u32 end = min(start + run, call.n);
    u32 above = 0;
    u32 tied = 0;
#pragma unroll 8
    for (u32 first = start; first < end; first += 32) {
        const u32 rank = first + lane < end ? rank_at(first + lane) : 0;
        above += first + lane < end && rank > known;
        tied += first + lane < end && rank == known;
    }
    above = __reduce_add_sync(ALL_LANES, above);
    tied = __reduce_add_sync(ALL_LANES, tied);
    if (lane == 0) of_warps[warp] = above, tied_of_warps[warp] = tied;
    __syncthreads();
    above = __reduce_add_sync(ALL_LANES, lane < warp ? of_warps[lane] : 0);
    tied = __reduce_add_sync(ALL_LANES, lane < warp ? tied_of_warps[lane] : 0);
    u32* chosen = (u32*)call.chosen + (u64)blockIdx.x * call.k;
    const u32 lower = (1u << lane) - 1;
#pragma unroll 8
    for (u32 first = start; first < end; first += 32) {
        const bool exists = first + lane < end;
        const u32 rank = exists ? rank_at(first + lane) : 0;
        const u32 are_above = __ballot_sync(ALL_LANES, exists && rank > known);
        const u32 are_tied = __ballot_sync(ALL_LANES, exists && rank == known);
        const u32 above_before = above + __popc(are_above & lower);
        const u32 tied_before = tied + __popc(are_tied & lower);
        const bool taken = (are_above | (tied_before < wanted ? are_tied : 0)) >> lane & 1;
        if (taken) chosen[above_before + min(tied_before, wanted)] = first + lane;
        above += __popc(are_above);
        tied += __popc(are_tied);
    }
}
