// merge_tokens: kept rows with the evicted rows merged into them whose nearest they are, c to one.
//
//   averaged (p + Σ e) / (c + 1),  pivotal (p + Σ (e + p) / 2) / (c + 1),  weighted (p + Σ similarity · e) / (c + 1)
//
// One block owns KEPT_TILE kept tokens of a KV head. It walks over the assignments of all evicted tokens, one for each thread
// at a time, whose votes mark those that enter its kept tokens; then all threads take the marked ones in order, each adding
// its own channels. So rows are read once and coalesced, every sum is made in the order of the evicted tokens, and two runs
// give the same bits.
//
// In bounds: kept tokens beyond those of the call are not written; tokens are clamped; assignments outside the tile, whatever
// they are, are passed over; memory was checked on the host. MERGING is 0 averaged, 1 pivotal, 2 weighted.

#pragma once

#include "select/merge_call.cuh"

constexpr u32 MERGE_THREADS = 128;
constexpr u32 KEPT_TILE = 2048 / HEAD_DIM;

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) merge_tokens(const MergeCall call) {
    // A thread owns every MERGE_THREADS-th channel of each.
    __shared__ float sums[KEPT_TILE][HEAD_DIM];
    __shared__ u32 counts[KEPT_TILE];
    __shared__ u32 marks[MERGE_THREADS / 32];
    const u32 kv_head = blockIdx.y;
    const u32 first_kept = blockIdx.x * KEPT_TILE;
    const u32 own_kept = min(KEPT_TILE, call.kept - first_kept);
    for (u32 i = 0; i < KEPT_TILE; i++) {
        for (u32 channel = threadIdx.x; channel < HEAD_DIM; channel += MERGE_THREADS) sums[i][channel] = 0.0f;
    }
    if (threadIdx.x < KEPT_TILE) counts[threadIdx.x] = 0;
    const u32* kept = (const u32*)call.kept_tokens + (u64)kv_head * call.kept;
    const u32* evicted = (const u32*)call.evicted_tokens + (u64)kv_head * call.evicted;
    const u32* nearest = (const u32*)call.nearest + (u64)kv_head * call.evicted;
    const float* similarities = (const float*)call.similarities + (u64)kv_head * call.evicted;
    for (u32 first = 0; first < call.evicted; first += MERGE_THREADS) {
        const u32 own = first + threadIdx.x;
        // Below first_kept it wraps around and is beyond the tile.
        const u32 votes = __ballot_sync(ALL_LANES, own < call.evicted && nearest[own] - first_kept < own_kept);
        __syncthreads();
        if (threadIdx.x % 32 == 0) marks[threadIdx.x / 32] = votes;
        __syncthreads();
        for (u32 word = 0; word < MERGE_THREADS / 32; word++) {
            for (u32 left = marks[word]; left != 0; left &= left - 1) {
                const u32 member = first + 32 * word + __ffs(left) - 1;
                const u32 into = nearest[member] - first_kept;
                const u64 start = row_start(call, evicted[member], kv_head);
                const float weight = MERGING == 2 ? similarities[member] : 1.0f;
                for (u32 channel = threadIdx.x; channel < HEAD_DIM; channel += MERGE_THREADS) {
                    sums[into][channel] += weight * load_element((const void*)call.rows, KEY_TYPE, start + channel);
                }
                if (threadIdx.x == 0) counts[into]++;
            }
        }
    }
    __syncthreads();
    for (u32 i = 0; i < own_kept; i++) {
        const u64 start = row_start(call, kept[first_kept + i], kv_head);
        float* merged = (float*)call.merged + ((u64)kv_head * call.kept + first_kept + i) * HEAD_DIM;
        const float count = (float)counts[i];
        for (u32 channel = threadIdx.x; channel < HEAD_DIM; channel += MERGE_THREADS) {
            float x = load_element((const void*)call.rows, KEY_TYPE, start + channel);
            if (counts[i] > 0) {
                const float sum = sums[i][channel];
                x = (x + (MERGING == 1 ? 0.5f * (count * x + sum) : sum)) / (count + 1.0f);
            }
            merged[channel] = x;
        }
    }
}
