// sum_partials: combines the statistics of all parts of the keys. sum_counts: sums their counts.
//
//   max = max over parts,  lse = max + ln Σ sum_part · exp(max_part − max)
//
// One thread owns one row of one query head and takes the parts in their order. Reads are coalesced.
//
// In bounds: threads beyond `rows` return; the memory was made by the plan for `parts` parts of `rows` rows.

#pragma once

#include "common/ptx.cuh"

struct SumCall {
    u64 partials;
    u64 row_max;
    u64 row_lse;
    u64 counts;
    // Rows of all query heads.
    u32 rows;
    u32 parts;
};

extern "C" __global__ void sum_partials(const SumCall call) {
    const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= call.rows) return;
    const float2* partials = (const float2*)call.partials + row;
    float largest = partials[0].x;
    for (u32 part = 1; part < call.parts; part++) largest = fmaxf(largest, partials[(u64)part * call.rows].x);
    float sum = 0.0f;
    for (u32 part = 0; part < call.parts; part++) {
        const float2 stats = partials[(u64)part * call.rows];
        sum += stats.y * __expf(stats.x - largest);
    }
    ((float*)call.row_max)[row] = largest;
    ((float*)call.row_lse)[row] = largest + logf(sum);
}

extern "C" __global__ void sum_counts(const SumCall call) {
    const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= call.rows) return;
    u32 sum = 0;
    for (u32 part = 0; part < call.parts; part++) sum += ((const u32*)call.partials)[(u64)part * call.rows + row];
    ((u32*)call.counts)[row] = sum;
}
