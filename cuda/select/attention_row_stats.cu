// attention_row_stats: the largest score of every query row, and the sum of the exponentials of its scores, over the
// keys of one part.
//
//   s = q · k / √HEAD_DIM,  max = max s,  sum = Σ exp(s − max)  over visible keys of the part
//
// A warp reduces a tile of keys by shuffles and combines it with its statistics of the row so far, in shared memory.
// After a chunk, one thread per row combines the warps in order with the part's statistics so far, in `row_partials`.
// Every sum has a fixed order. Keys are read once, and no scores are written. select/stats_call.cuh describes how the
// keys are cut.
//
// In bounds: part and head are the grid's, which the plan made; keys, rows and positions beyond those of the call are
// not read; tensors and partials were checked against the call on the host, shared memory is made for `staged` eights.

#pragma once

#include "select/stats_call.cuh"

// Below every score.
constexpr float LOWEST = -3.4028234e38f;

__device__ __forceinline__ float2 join_stats(float2 a, float2 b) {
    const float largest = fmaxf(a.x, b.x);
    return make_float2(largest, a.y * __expf(a.x - largest) + b.y * __expf(b.x - largest));
}

// Largest product of the tile's keys with a row, and the sum of the exponentials of their scores. With MASKED only the
// keys below `seen` count.
template <bool MASKED>
__device__ __forceinline__ float2 reduce_tile(const float (&products)[M_TILES][4], u32 column, u32 seen, u32 first_key,
                                              float scale, u32 lane) {
    float values[SLOTS];
    float largest = LOWEST;
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) {
        values[i] = products[i / 2][2 * (i % 2) + column];
        if (MASKED && first_key + 8 * i + lane / 4 >= seen) values[i] = LOWEST;
        largest = fmaxf(largest, values[i]);
    }
#pragma unroll
    for (u32 distance = 4; distance < 32; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
    }
    const float shift = largest * (scale * LOG2_E);
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) {
        const float weight = exp2_approx(values[i] * (scale * LOG2_E) - shift);
        sum += MASKED && values[i] == LOWEST ? 0.0f : weight;
    }
#pragma unroll
    for (u32 distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    return make_float2(MASKED && largest == LOWEST ? LOWEST : largest * scale, sum);
}

// Combines the tile with the warp's statistics of the chunk's rows.
template <bool MASKED>
__device__ __forceinline__ void measure_tile(const Resident& resident, const uint4* staged, float2* own, const u32* seen,
                                             u32 eights, u32 first_key, float scale, u32 lane) {
#pragma unroll 1
    for (u32 first = 0; first < 8 * eights; first += 8 * AT_ONCE) {
        Products products;
        multiply_staged(products, resident, staged + first / 8 * EIGHT_LOADS, lane);
        // Row 8 e + 2 (lane % 4) + column: lane l combines the one of four groups of eight rows for which l / 4 is 2 e
        // + column.
        float2 joins = make_float2(LOWEST, 0.0f);
#pragma unroll
        for (u32 e = 0; e < AT_ONCE; e++) {
#pragma unroll
            for (u32 column = 0; column < 2; column++) {
                const u32 row = first + 8 * e + 2 * (lane % 4) + column;
                const float2 stats =
                    reduce_tile<MASKED>(products.of[e], column, MASKED ? seen[row] : 0, first_key, scale, lane);
                if (lane / 4 == 2 * (e % 4) + column) joins = stats;
            }
            if (e % 4 == 3 || e + 1 == AT_ONCE) {
                const u32 row = 8 * (e / 4 * 4 + lane / 8) + 2 * (lane % 4) + lane / 4 % 2;
                if (row < 8 * AT_ONCE) own[first + row] = join_stats(own[first + row], joins);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) attention_row_stats(const StatsCall call) {
    // The staged rows, the keys that they see, and (max, sum) as [warp][row].
    extern __shared__ uint4 shared[];
    u32* seen = (u32*)(shared + call.staged * EIGHT_LOADS);
    float2* of_warps = (float2*)(seen + 8 * call.staged);
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    const u32 part = blockIdx.x;
    const PassingRows rows(call, blockIdx.y);
    float2* partials = (float2*)call.row_partials + (u64)part * call.kv_heads * call.group * call.rows;
    for (u32 i = threadIdx.x; i < call.group * call.rows; i += blockDim.x) {
        partials[(u64)rows.kv_head * call.group * call.rows + i] = make_float2(LOWEST, 0.0f);
    }
    const auto stage = [&](u32 chunk) {
        stage_chunk(shared, seen, call, rows, chunk, [&](u32 index, const PassingRow&) {
            for (u32 w = 0; w < WARPS; w++) of_warps[w * 8 * call.staged + index] = make_float2(LOWEST, 0.0f);
        });
    };
    const auto join_warps = [&](u32 chunk) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < 8 * call.staged; i += blockDim.x) {
            const PassingRow row(call, rows, chunk + i / 8, i % 8);
            if (!row.exists) continue;
            float2 stats = partials[row.at(call)];
            for (u32 w = 0; w < WARPS; w++) stats = join_stats(stats, of_warps[w * 8 * call.staged + i]);
            partials[row.at(call)] = stats;
        }
    };
    if (rows.at_once) stage(0);
    for (u32 t = 0; t < call.part_tiles; t += WARPS) {
        const u32 block_key = (part * call.part_tiles + t) * WARP_ROWS;
        if (block_key >= call.tokens) break;
        const u32 first_key = block_key + warp * WARP_ROWS;
        const u32 group = warp / GROUP_WARPS * GROUP_WARPS;
        const u32 group_key = block_key + group * WARP_ROWS;
        const bool has_tile = t + group < call.part_tiles && group_key < call.tokens;
        Resident resident;
        if (has_tile) load_keys(resident, call, first_key, rows.kv_head, lane);
        for (u32 chunk = 0; chunk < rows.eights; chunk += call.staged) {
            if (!rows.at_once) {
                if (chunk_is_blind(call, rows, chunk, block_key)) continue;
                // All threads have combined the previous chunk.
                __syncthreads();
                stage(chunk);
            }
            if (t == 0 || !rows.at_once) {
                copies_wait<0>();
                if (WARPGROUPS) shared_visible();
                __syncthreads();
            }
            if (has_tile) {
                float2* own = of_warps + warp * 8 * call.staged;
                if (all_see(seen, 8 * call.staged, group_key + GROUP_ROWS, lane)) {
                    measure_tile<false>(resident, shared, own, seen, call.staged, first_key, call.scale, lane);
                } else {
                    measure_tile<true>(resident, shared, own, seen, call.staged, first_key, call.scale, lane);
                }
            }
            if (!rows.at_once) join_warps(chunk);
        }
    }
    if (rows.at_once) join_warps(0);
}
