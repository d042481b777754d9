// attention_column_stats: what every key receives, and how many keys each row needs.
//
//   column_sums[key] = Σ over rows of exp(s − lse),  s = q · k / √HEAD_DIM
//   counts[row] = visible keys of the part with s ≥ max + log_threshold
//
// Column sums are kept per query head, or become the sum, mean or maximum over the heads of a group (AGGREGATION).
//
// One block owns a part: some tiles of TILE_ROWS keys of one KV head. A warp holds its keys of a tile as MMA operands in
// registers; the query rows of the head's group pass by through shared memory, STAGED at a time. The four lanes of a quad
// hold a key's sums over two columns of every eight and add them at the end of a head. Counts (COUNTING) are votes, added
// as integers. So every sum has a fixed order; keys are read once, and neither scores nor weights are written.
//
// In bounds: as in attention_row_stats.

#pragma once

#include "select/stats_call.cuh"

// AGGREGATION: 0: each query head for itself, 1: sum, 2: mean, 3: maximum.

extern "C" __global__ void __launch_bounds__(32 * WARPS) attention_column_stats(const StatsCall call) {
    __shared__ StagedRows staged;
    __shared__ u32 reached[STAGED];
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    const u32 part = blockIdx.x;
    const u32 kv_head = blockIdx.y;
    u32* counts = (u32*)call.count_partials + (u64)(part * call.kv_heads + kv_head) * call.group * call.rows;
    // The thread that adds up a row is the one that clears it.
    if (COUNTING && threadIdx.x < STAGED) {
        for (u32 g = 0; g < call.group; g++) {
            for (u32 row = threadIdx.x; row < call.rows; row += STAGED) counts[g * call.rows + row] = 0;
        }
    }
    for (u32 t = 0; t < call.part_tiles; t++) {
        const u32 tile = (part * call.part_tiles + t) * TILE_ROWS;
        if (tile >= call.tokens) break;
        const u32 first_key = tile + warp * WARP_ROWS;
        Resident resident;
        load_keys(resident, call, first_key, kv_head, lane);
        float aggregated[2 * M_TILES];
#pragma unroll
        for (u32 i = 0; i < 2 * M_TILES; i++) aggregated[i] = 0.0f;
        for (u32 g = 0; g < call.group; g++) {
            const u32 query_head = kv_head * call.group + g;
            float sums[2 * M_TILES];
#pragma unroll
            for (u32 i = 0; i < 2 * M_TILES; i++) sums[i] = 0.0f;
            for (u32 first = 0; first < call.rows; first += STAGED) {
                // Rows before the tile see none of it.
                if (seen_by(call, min(first + STAGED, call.rows) - 1) <= tile) continue;
                __syncthreads();
                stage_queries(staged, call, first, query_head);
                if (COUNTING && threadIdx.x < STAGED) reached[threadIdx.x] = 0;
                __syncthreads();
                for (u32 eight = 0; eight < STAGED && first + eight < call.rows; eight += 8) {
                    float products[M_TILES][4];
                    multiply_staged(products, resident, staged, eight, lane);
#pragma unroll
                    for (u32 column = 0; column < 2; column++) {
                        const u32 row = first + eight + 2 * (lane % 4) + column;
                        const u32 seen = seen_by(call, row);
                        const u64 at = (u64)query_head * call.rows + min(row, call.rows - 1);
                        const float lse = ((const float*)call.row_lse)[at];
                        const float least = COUNTING ? ((const float*)call.row_max)[at] + call.log_threshold : 0.0f;
                        u32 count = 0;
#pragma unroll
                        for (u32 i = 0; i < 2 * M_TILES; i++) {
                            const u32 key = first_key + 8 * i + lane / 4;
                            const float score = products[i / 2][2 * (i % 2) + column] * call.scale;
                            if (key < seen) sums[i] += __expf(score - lse);
                            if (COUNTING) {
                                const u32 votes = __ballot_sync(ALL_LANES, key < seen && score >= least);
                                count += __popc(votes & (0x11111111u << (lane % 4)));
                            }
                        }
                        if (COUNTING && lane < 4) atomicAdd(&reached[row - first], count);
                    }
                }
                if (COUNTING) {
                    __syncthreads();
                    if (threadIdx.x < STAGED && first + threadIdx.x < call.rows) {
                        counts[g * call.rows + first + threadIdx.x] += reached[threadIdx.x];
                    }
                }
            }
#pragma unroll
            for (u32 i = 0; i < 2 * M_TILES; i++) {
                float sum = sums[i];
                sum += __shfl_xor_sync(ALL_LANES, sum, 1);
                sum += __shfl_xor_sync(ALL_LANES, sum, 2);
                const u32 key = first_key + 8 * i + lane / 4;
                if (AGGREGATION == 0) {
                    if (lane % 4 == 0 && key < call.tokens) {
                        ((float*)call.column_sums)[(u64)query_head * call.tokens + key] = sum;
                    }
                } else {
                    // Column sums are not negative.
                    aggregated[i] = AGGREGATION == 3 ? fmaxf(aggregated[i], sum) : aggregated[i] + sum;
                }
            }
        }
        if (AGGREGATION != 0 && lane % 4 == 0) {
#pragma unroll
            for (u32 i = 0; i < 2 * M_TILES; i++) {
                const u32 key = first_key + 8 * i + lane / 4;
                if (key < call.tokens) {
                    const float divisor = AGGREGATION == 2 ? (float)call.group : 1.0f;
                    ((float*)call.column_sums)[(u64)kv_head * call.tokens + key] = aggregated[i] / divisor;
                }
            }
        }
    }
}
