// How the sums of a tile become outputs.
//
// The tile has as many parts as blocks, and each block adds the sums of its own part and writes the outputs. Two blocks
// are a cluster and send sums to each other. More of them write sums to memory: fewer clusters of three and four run at
// once. No block waits for another without an end, as others may not have begun: one that comes early leaves its part
// to the last one. Sums are added in the order of the blocks, whoever adds them.

#pragma once

#include "tile.cuh"

// Sends the sums of the other block's part, and adds those that it sends. The parts that this block writes, as bits.
__device__ __forceinline__ u32 exchange(float (&sums)[EIGHTS][4], u32 base, u32 thread) {
    auto place = [&](u32 i) { return base + (i % (EIGHTS / 2) * CONSUMERS + thread) * 16; };
    const u32 rank = cluster_rank();
    // Both have read their rings.
    cluster_sync();
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++) {
        if (part_of(i) != rank) store_shared_at(place(i), part_of(i), sums[i]);
    }
    cluster_sync();
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++) {
        if (part_of(i) != rank) continue;
        const float4 other = load_shared(place(i));
        sums[i][0] += other.x, sums[i][1] += other.y, sums[i][2] += other.z, sums[i][3] += other.w;
    }
    return 1u << rank;
}

// How often a block looks whether the others have come, about a microsecond each.
constexpr u32 LOOKS = 8;

// The sums that a thread of a block has in memory, by eights of rows.
__device__ __forceinline__ float4* partial_at(const TilesCall& call, u32 tile, u32 of, u32 thread) {
    return reinterpret_cast<float4*>(call.partial) + (tile * SPLIT + of) * (EIGHTS * CONSUMERS) + thread;
}

__device__ __forceinline__ void store_partial(float4* to, const float (&sums)[EIGHTS][4], u32 rank, bool own) {
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++) {
        if ((part_of(i) == rank) == own) {
            __stcg(to + i * CONSUMERS, make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]));
        }
    }
    __threadfence();
    consumers_sync();
}

// Adds the sums of the blocks of a tile through memory. The parts that this block has then and writes, as bits.
//
// A block writes the parts of the others and counts itself among the blocks that have come to each. If all others have
// come to its own part, it adds that from registers. Otherwise it writes that too, and the last one to come adds it.
__device__ __forceinline__ u32 gather(const TilesCall& call, float (&sums)[EIGHTS][4], u32 tile, u32 base, u32 thread) {
    const u32 rank = blockIdx.x % SPLIT;
    u32* const came = reinterpret_cast<u32*>(call.came) + tile * SPLIT;
    const u32 flag = base + BARRIERS_AT + 16 * SLOTS;
    store_partial(partial_at(call, tile, rank, thread), sums, rank, false);
    if (thread < 32) {
        u32 before = 0;
        if (thread < SPLIT && thread != rank) before = atomicAdd(came + thread, 1);
        if (thread == rank) {
            for (u32 look = 0; look < LOOKS && before != SPLIT - 1; look++) before = atomicAdd(came + rank, 0);
        }
        const u32 last = __ballot_sync(0xffffffffu, thread < SPLIT && before == SPLIT - 1);
        __threadfence();
        if (thread == 0) store_word(flag, last);
    }
    consumers_sync();
    u32 has = load_word(flag);
    if ((has >> rank & 1) == 0) {
        store_partial(partial_at(call, tile, rank, thread), sums, rank, true);
        if (thread == 0) {
            const bool is_last = atomicAdd(came + rank, 1) == SPLIT - 1;
            __threadfence();
            store_word(flag, is_last ? has | 1u << rank : has);
        }
        consumers_sync();
        has = load_word(flag);
    }
    // For the next launch.
    if (thread < SPLIT && (has >> thread & 1) != 0) came[thread] = 0;
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++) {
        if ((has >> part_of(i) & 1) == 0) continue;
        float4 sum = {};
#pragma unroll
        for (u32 k = 0; k < SPLIT; k++) {
            float4 other = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
            if (k != rank) other = __ldcg(partial_at(call, tile, k, thread) + i * CONSUMERS);
            sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
        }
        sums[i][0] = sum.x, sums[i][1] = sum.y, sums[i][2] = sum.z, sums[i][3] = sum.w;
    }
    return has;
}

__device__ __forceinline__ u32 output_pair(float x, float y) {
    if constexpr (OUTPUT == 1) return halves_of(x, y);
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

// Two numbers of a row of 8 × 8 in lanes become two of a column.
__device__ __forceinline__ u32 turned(u32 pair) {
    u32 of_column;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(of_column) : "r"(pair));
    return of_column;
}

__device__ __forceinline__ void store_one(u64 outputs, size_t at, float x) {
    if constexpr (OUTPUT == 0) reinterpret_cast<float*>(outputs)[at] = x;
    else reinterpret_cast<unsigned short*>(outputs)[at] = static_cast<unsigned short>(output_pair(x, 0.0f));
}

__device__ __forceinline__ float unit_of(const TilesCall& call, u32 row) {
    if (!UNITS || row >= call.rows) return 1.0f;
    return __ldg(reinterpret_cast<const float*>(call.units) + row);
}

// Writes the sums of a strip, from `output` on, and of a tile's rows from `row` on: those of the parts `has`.
__device__ __forceinline__ void store_strip(const TilesCall& call, const float (&sums)[EIGHTS][4], u32 row, u32 output,
                                            u32 has, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i += 2) {
        if (SPLIT > 1 && (has >> part_of(i) & 1) == 0) continue;
        float units[2][2];
#pragma unroll
        for (u32 k = 0; k < 4; k++) units[k / 2][k % 2] = unit_of(call, row + 8 * (i + k / 2) + 2 * (lane % 4) + k % 2);
        if constexpr (WIDE && OUTPUT != 0) {
            u32 pairs[4];
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                const float* const x = sums[i + k / 2] + k % 2 * 2;
                pairs[k] = turned(output_pair(units[k / 2][0] * x[0], units[k / 2][1] * x[1]));
            }
            const uint4 eight = transposed({pairs[0], pairs[1], pairs[2], pairs[3]}, lane);
            const u32 of = row + 8 * (i + lane / 2 % 2) + lane / 4;
            unsigned short* const row_of =
                reinterpret_cast<unsigned short*>(call.outputs) + static_cast<size_t>(of) * OUTPUTS;
            const u32 first = output + 8 * (lane % 2);
            if (of < call.rows && first < OUTPUTS) *reinterpret_cast<uint4*>(row_of + first) = eight;
        } else {
#pragma unroll
            for (u32 k = 0; k < 8; k++) {
                const u32 of = row + 8 * (i + k / 4) + 2 * (lane % 4) + k % 2;
                const u32 to = output + lane / 4 + 8 * (k / 2 % 2);
                const size_t place = static_cast<size_t>(of) * OUTPUTS + to;
                const float sum = units[k / 4][k % 2] * sums[i + k / 4][k % 4];
                if (of < call.rows && to < OUTPUTS) store_one(call.outputs, place, sum);
            }
        }
    }
}
