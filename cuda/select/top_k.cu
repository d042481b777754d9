// top_k: the indices of the k largest scores of every KV head, ascending; of equal scores the lower indices.
//
// One block owns a head. Scores become integers that order alike (−0 equals +0, NaN lies below −∞). Four passes over the
// scores find the k-th largest integer byte by byte: each counts, in a histogram, the next byte of those that agree with
// what is known so far. Integer atomics give the same histogram in every order. Then a thread owns a run of scores: it
// counts what lies above the k-th and what equals it, a scan over the threads tells where its run begins in the result, and
// of those that equal the k-th the first that are still needed are taken.
//
// Six reads of every score, the first four coalesced; exact for any k and n.
//
// In bounds: the grid has one block per head; scores and result were checked against n and k on the host.

#pragma once

#include "common/ptx.cuh"

struct TopKCall {
    u64 scores;
    // [kv_head][k].
    u64 chosen;
    u32 n;
    u32 k;
};

constexpr u32 TOP_THREADS = 1024;
constexpr u32 BINS = 256;

// A number that orders as scores do.
__device__ __forceinline__ u32 rank_of(u32 bits) {
    const u32 magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0;
    if (magnitude == 0) return 0x80000000u;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Sums over the threads before this one; `of_warps` is shared.
__device__ __forceinline__ uint2 sums_before(uint2 own, uint2* of_warps) {
    const u32 lane = threadIdx.x % 32;
    uint2 sum = own;
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u32 x = __shfl_up_sync(ALL_LANES, sum.x, distance);
        const u32 y = __shfl_up_sync(ALL_LANES, sum.y, distance);
        if (lane >= distance) sum = make_uint2(sum.x + x, sum.y + y);
    }
    if (lane == 31) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    uint2 before = make_uint2(sum.x - own.x, sum.y - own.y);
    for (u32 warp = 0; warp < threadIdx.x / 32; warp++) {
        before = make_uint2(before.x + of_warps[warp].x, before.y + of_warps[warp].y);
    }
    __syncthreads();
    return before;
}

extern "C" __global__ void __launch_bounds__(TOP_THREADS) top_k(const TopKCall call) {
    __shared__ u32 histogram[BINS];
    __shared__ uint2 of_warps[TOP_THREADS / 32];
    // The byte of the k-th score, and how many scores have a larger one.
    __shared__ uint2 found;
    const u32* scores = (const u32*)call.scores + (u64)blockIdx.x * call.n;
    // The bytes of the k-th rank that are known, and how many are wanted of those that agree with them.
    u32 known = 0;
    u32 mask = 0;
    u32 wanted = call.k;
    for (u32 shift = 32; shift > 0;) {
        shift -= 8;
        if (threadIdx.x < BINS) histogram[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll 4
        for (u32 i = threadIdx.x; i < call.n; i += TOP_THREADS) {
            const u32 rank = rank_of(scores[i]);
            if ((rank & mask) == known) atomicAdd(&histogram[rank >> shift & 255u], 1u);
        }
        __syncthreads();
        // From the largest byte down.
        const u32 byte = BINS - 1 - threadIdx.x % BINS;
        const u32 count = threadIdx.x < BINS ? histogram[byte] : 0;
        const u32 before = sums_before(make_uint2(count, 0), of_warps).x;
        if (before < wanted && wanted <= before + count) found = make_uint2(byte, before);
        __syncthreads();
        known |= found.x << shift;
        mask |= 255u << shift;
        wanted -= found.y;
        __syncthreads();
    }

    const u32 run = (call.n + TOP_THREADS - 1) / TOP_THREADS;
    const u32 start = min(threadIdx.x * run, call.n);
    const u32 end = min(start + run, call.n);
    // Above the k-th, and equal to it.
    uint2 own = make_uint2(0, 0);
    for (u32 i = start; i < end; i++) {
        const u32 rank = rank_of(scores[i]);
        own.x += rank > known;
        own.y += rank == known;
    }
    uint2 before = sums_before(own, of_warps);
    u32* chosen = (u32*)call.chosen + (u64)blockIdx.x * call.k;
    for (u32 i = start; i < end; i++) {
        const u32 rank = rank_of(scores[i]);
        if (rank > known || (rank == known && before.y < wanted)) chosen[before.x + min(before.y, wanted)] = i;
        before.x += rank > known;
        before.y += rank == known;
    }
}
