// attention_column_stats: the attention that every key receives, and how many keys each row needs.
//
//   column_sums[key] = Σ over rows of exp(s − lse),  s = q · k / √HEAD_DIM
//   counts[row] = visible keys of the part with s ≥ max + log_threshold
//
// Column sums are kept per query head, or combined into the sum, mean or maximum over the heads of a group
// (AGGREGATION).
//
// The four lanes of a quad hold a key's sums over two rows of every eight, and add them at the end of a head. Counts
// (COUNTING) are integers: warps add them, and a chunk adds those of its warps. Every sum has a fixed order. Keys are
// read once, and neither scores nor weights are written. select/stats_call.cuh describes how the keys are cut.
//
// In bounds: as in attention_row_stats.

#pragma once

#include "common/reduce.cuh"
#include "select/stats_call.cuh"

// The keys of a warp's next tile are loaded before the products of this one, where there are registers for them.
constexpr bool AHEAD = WARPGROUPS && !COUNTING && KEY_TYPE == ELEMENTS_F16 && KEYS_ALIGNED;

// AGGREGATION: 0: per query head, 1: sum, 2: mean, 3: maximum. ADDS: sums are added to what is there.

// The contents of shared memory: the staged groups of eight rows and, for each row, the number of keys that it sees,
// its log-sum-exp in powers of two, the least score that counts, and the counts as [warp][row].
struct SharedRows {
    uint4* staged;
    u32* seen;
    float* lse;
    float* least;
    u32* counts;

    __device__ __forceinline__ SharedRows(uint4* shared, const StatsCall& call)
        : staged(shared),
          seen((u32*)(shared + call.staged * EIGHT_LOADS)),
          lse((float*)seen + 8 * call.staged),
          least(lse + 8 * call.staged),
          counts((u32*)(least + 8 * call.staged)) {}
};

// Adds the weights of the tile's products with eight rows to the sums of its keys, and counts. MASKED where a row may
// not see all keys.
template <bool MASKED>
__device__ __forceinline__ void add_tile(const float (&products)[M_TILES][4], float (&sums)[SLOTS],
                                         const SharedRows& rows, u32* counts, u32 eight, u32 first_key, float scale,
                                         u32 lane) {
    const u32 row = 8 * eight + 2 * (lane % 4);
    const float2 lse = *(const float2*)&rows.lse[row];
    const uint2 seen = MASKED ? *(const uint2*)&rows.seen[row] : make_uint2(0, 0);
    const float2 least = COUNTING ? *(const float2*)&rows.least[row] : make_float2(0.0f, 0.0f);
    // The count of the even row is in the low half, that of the odd one in the high half.
    u32 count = 0;
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) {
        const u32 key = first_key + 8 * i + lane / 4;
        const float even = products[i / 2][2 * (i % 2)];
        const float odd = products[i / 2][2 * (i % 2) + 1];
        const bool even_sees = !MASKED || key < seen.x;
        const bool odd_sees = !MASKED || key < seen.y;
        const float of_even = exp2_approx(even * (scale * LOG2_E) - lse.x);
        const float of_odd = exp2_approx(odd * (scale * LOG2_E) - lse.y);
        sums[i] += (even_sees ? of_even : 0.0f) + (odd_sees ? of_odd : 0.0f);
        if (COUNTING) {
            count += even_sees && even * scale >= least.x ? 1u : 0u;
            count += odd_sees && odd * scale >= least.y ? 0x10000u : 0u;
        }
    }
    if (COUNTING) {
#pragma unroll
        for (u32 distance = 4; distance < 32; distance *= 2) count += __shfl_xor_sync(ALL_LANES, count, distance);
        if (lane < 4) {
            uint2* own = (uint2*)&counts[row];
            const uint2 before = *own;
            *own = make_uint2(before.x + (count & 0xffffu), before.y + (count >> 16));
        }
    }
}

// The keys of a warp's tile, and the sums for them.
struct Tile {
    Resident keys;
    float sums[SLOTS];
    float aggregated[SLOTS];
    u32 first_key;
};

// The end of a query head: its sums are written, or aggregated over the group.
template <bool MASKED>
__device__ __forceinline__ void end_head(Tile& tile, const StatsCall& call, u32 kv_head, u32 of_group, u32 lane) {
    const bool writes = AGGREGATION == 0 || of_group + 1 == call.group;
    const u64 row = AGGREGATION == 0 ? kv_head * call.group + of_group : kv_head;
    float* column_sums = (float*)call.column_sums + row * call.sum_stride + tile.first_key + lane / 4;
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) {
        float sum = tile.sums[i];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        tile.sums[i] = 0.0f;
        // Column sums are not negative.
        if (AGGREGATION == 3) tile.aggregated[i] = larger(tile.aggregated[i], sum);
        if (AGGREGATION == 1 || AGGREGATION == 2) tile.aggregated[i] += sum;
        const float divisor = AGGREGATION == 2 ? (float)call.group : 1.0f;
        const bool exists = !MASKED || tile.first_key + 8 * i + lane / 4 < call.tokens;
        if (writes && exists && lane % 4 == i % 4) {
            const float before = ADDS ? column_sums[8 * i] : 0.0f;
            column_sums[8 * i] = before + (AGGREGATION == 0 ? sum : tile.aggregated[i] / divisor);
        }
    }
}

template <bool MASKED>
__device__ __forceinline__ void measure_chunk(Tile& tile, const SharedRows& shared, u32* counts, const StatsCall& call,
                                              const PassingRows& rows, u32 chunk, u32 lane) {
    u32 of_group = chunk / rows.of_head;
    u32 left = rows.of_head - chunk % rows.of_head;
    const auto next_head = [&]() {
        // The rows that fill up a chunk belong to no head.
        if (of_group < call.group) end_head<MASKED>(tile, call, rows.kv_head, of_group, lane);
        of_group++;
        left = rows.of_head;
    };
#pragma unroll 1
    for (u32 eight = 0; eight < call.staged; eight += AT_ONCE) {
        Products products;
        multiply_staged(products, tile.keys, shared.staged + eight * EIGHT_LOADS, lane);
        if (left >= AT_ONCE) {
            // All rows belong to one head.
#pragma unroll
            for (u32 e = 0; e < AT_ONCE; e++) {
                add_tile<MASKED>(products.of[e], tile.sums, shared, counts, eight + e, tile.first_key, call.scale, lane);
            }
            left -= AT_ONCE;
        } else {
#pragma unroll
            for (u32 e = 0; e < AT_ONCE; e++) {
                if (left == 0) next_head();
                add_tile<MASKED>(products.of[e], tile.sums, shared, counts, eight + e, tile.first_key, call.scale, lane);
                left--;
            }
        }
        if (left == 0) next_head();
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) attention_column_stats(const StatsCall call) {
    extern __shared__ uint4 memory[];
    const SharedRows shared(memory, call);
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    const u32 part = blockIdx.x;
    const PassingRows rows(call, blockIdx.y);
    const u64 of_part = (u64)part * call.kv_heads * call.group * call.rows;
    u32* partials = (u32*)call.count_partials + of_part;
    u32* counts = shared.counts + warp * 8 * call.staged;
    if (COUNTING) {
        for (u32 i = threadIdx.x; i < call.group * call.rows; i += blockDim.x) {
            partials[(u64)rows.kv_head * call.group * call.rows + i] = 0;
        }
    }
    const auto stage = [&](u32 chunk) {
        stage_chunk(shared.staged, shared.seen, call, rows, chunk, [&](u32 index, const PassingRow& row) {
            // The weights of rows that do not exist are zero.
            shared.lse[index] = row.exists ? ((const float*)call.row_lse)[row.lse_at(call)] * LOG2_E : 1e30f;
            if (COUNTING) {
                const float max = row.exists ? ((const float*)call.row_max)[row.at(call)] : 0.0f;
                shared.least[index] = row.exists ? max + call.log_threshold : 3.4028234e38f;
                for (u32 w = 0; w < WARPS; w++) shared.counts[w * 8 * call.staged + index] = 0;
            }
        });
    };
    const auto add_warps = [&](u32 chunk) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < 8 * call.staged; i += blockDim.x) {
            const PassingRow row(call, rows, chunk + i / 8, i % 8);
            if (!row.exists) continue;
            u32 count = partials[row.at(call)];
            for (u32 w = 0; w < WARPS; w++) count += shared.counts[w * 8 * call.staged + i];
            partials[row.at(call)] = count;
        }
    };
    if (rows.at_once) stage(0);
    const u32 end_key = min((part + 1) * call.part_tiles * WARP_ROWS, call.tokens);
    ArrivingKeys arriving;
    if constexpr (AHEAD) {
        const u32 first_key = (part * call.part_tiles + warp) * WARP_ROWS;
        ask_for_keys(arriving, call, first_key, end_key, rows.kv_head, lane);
    }
    for (u32 t = 0; t < call.part_tiles; t += WARPS) {
        const u32 block_key = (part * call.part_tiles + t) * WARP_ROWS;
        if (block_key >= call.tokens) break;
        Tile tile;
        tile.first_key = block_key + warp * WARP_ROWS;
        const u32 group = warp / GROUP_WARPS * GROUP_WARPS;
        const u32 group_key = block_key + group * WARP_ROWS;
        const bool has_tile = t + group < call.part_tiles && group_key < call.tokens;
        if constexpr (AHEAD) {
            take_keys(tile.keys, arriving);
            const u32 next = tile.first_key + WARPS * WARP_ROWS;
            ask_for_keys(arriving, call, next, end_key, rows.kv_head, lane);
        } else if (has_tile) {
            load_keys(tile.keys, call, tile.first_key, rows.kv_head, lane);
        }
#pragma unroll
        for (u32 i = 0; i < SLOTS; i++) {
            tile.sums[i] = 0.0f;
            tile.aggregated[i] = 0.0f;
        }
        for (u32 chunk = 0; chunk < rows.eights; chunk += call.staged) {
            if (!rows.at_once) {
                if (chunk_is_blind(call, rows, chunk, block_key)) {
                    // The sums of a head that ends within the chunk are still written.
                    const u32 end = chunk + call.staged;
                    const bool ends = end / rows.of_head > chunk / rows.of_head || end >= rows.eights;
                    if (has_tile && ends) end_head<true>(tile, call, rows.kv_head, chunk / rows.of_head, lane);
                    continue;
                }
                // All threads have added the previous chunk.
                __syncthreads();
                stage(chunk);
            }
            if (t == 0 || !rows.at_once) {
                copies_wait<0>();
                if (WARPGROUPS) shared_visible();
                __syncthreads();
            }
            if (has_tile) {
                if (all_see(shared.seen, 8 * call.staged, group_key + GROUP_ROWS, lane)) {
                    measure_chunk<false>(tile, shared, counts, call, rows, chunk, lane);
                } else {
                    measure_chunk<true>(tile, shared, counts, call, rows, chunk, lane);
                }
            }
            if (COUNTING && !rows.at_once) add_warps(chunk);
        }
    }
    if (COUNTING && rows.at_once) add_warps(0);
}
