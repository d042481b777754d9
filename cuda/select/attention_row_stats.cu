// attention_row_stats: the largest score of every query row, and the sum of the exponentials of its scores, over the keys
// of one part.
//
//   s = q · k / √HEAD_DIM,  max = max s,  sum = Σ exp(s − max)  over visible keys of the part
//
// One block owns a part: some tiles of TILE_ROWS keys of one KV head. A warp holds its keys of a tile as MMA operands in
// registers; the query rows of the head's group pass by through shared memory, STAGED at a time. A warp reduces its keys by
// shuffles, a thread per staged row joins the warps in order and what the part has measured so far, in `row_partials`. So
// every sum has a fixed order; keys are read once, and no scores are written.
//
// In bounds: part and head are the grid's, which the plan made; keys, rows and positions beyond those of the call are not
// read; tensors and partials were checked against the call on the host.

#pragma once

#include "select/stats_call.cuh"

// Below every score.
constexpr float LOWEST = -3.4028234e38f;

__device__ __forceinline__ float2 join_stats(float2 a, float2 b) {
    const float largest = fmaxf(a.x, b.x);
    return make_float2(largest, a.y * __expf(a.x - largest) + b.y * __expf(b.x - largest));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) attention_row_stats(const StatsCall call) {
    __shared__ StagedRows staged;
    __shared__ float2 of_warps[WARPS][STAGED];
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    const u32 part = blockIdx.x;
    const u32 kv_head = blockIdx.y;
    float2* partials = (float2*)call.row_partials + (u64)(part * call.kv_heads + kv_head) * call.group * call.rows;
    // The thread that joins a row is the one that clears it.
    if (threadIdx.x < STAGED) {
        for (u32 g = 0; g < call.group; g++) {
            for (u32 row = threadIdx.x; row < call.rows; row += STAGED) {
                partials[g * call.rows + row] = make_float2(LOWEST, 0.0f);
            }
        }
    }
    for (u32 t = 0; t < call.part_tiles; t++) {
        const u32 tile = (part * call.part_tiles + t) * TILE_ROWS;
        if (tile >= call.tokens) break;
        const u32 first_key = tile + warp * WARP_ROWS;
        Resident resident;
        load_keys(resident, call, first_key, kv_head, lane);
        for (u32 g = 0; g < call.group; g++) {
            for (u32 first = 0; first < call.rows; first += STAGED) {
                // Rows before the tile see none of it.
                if (seen_by(call, min(first + STAGED, call.rows) - 1) <= tile) continue;
                __syncthreads();
                stage_queries(staged, call, first, kv_head * call.group + g);
                __syncthreads();
                for (u32 eight = 0; eight < STAGED && first + eight < call.rows; eight += 8) {
                    float products[M_TILES][4];
                    multiply_staged(products, resident, staged, eight, lane);
#pragma unroll
                    for (u32 column = 0; column < 2; column++) {
                        const u32 row = eight + 2 * (lane % 4) + column;
                        const u32 seen = seen_by(call, first + row);
                        float scores[2 * M_TILES];
                        float largest = LOWEST;
#pragma unroll
                        for (u32 i = 0; i < 2 * M_TILES; i++) {
                            const u32 key = first_key + 8 * i + lane / 4;
                            scores[i] = key < seen ? products[i / 2][2 * (i % 2) + column] * call.scale : LOWEST;
                            largest = fmaxf(largest, scores[i]);
                        }
#pragma unroll
                        for (u32 distance = 4; distance < 32; distance *= 2) {
                            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
                        }
                        float sum = 0.0f;
#pragma unroll
                        for (u32 i = 0; i < 2 * M_TILES; i++) {
                            if (scores[i] > LOWEST) sum += __expf(scores[i] - largest);
                        }
#pragma unroll
                        for (u32 distance = 4; distance < 32; distance *= 2) {
                            sum += __shfl_xor_sync(ALL_LANES, sum, distance);
                        }
                        if (lane < 4) of_warps[warp][row] = make_float2(largest, sum);
                    }
                }
                __syncthreads();
                if (threadIdx.x < STAGED && first + threadIdx.x < call.rows) {
                    float2* joined = partials + g * call.rows + first + threadIdx.x;
                    float2 stats = *joined;
                    for (u32 w = 0; w < WARPS; w++) stats = join_stats(stats, of_warps[w][threadIdx.x]);
                    *joined = stats;
                }
            }
        }
    }
}
