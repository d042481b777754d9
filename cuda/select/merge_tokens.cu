// merge_tokens: kept rows with the evicted rows merged into them whose nearest they are, c to one.
//
//   averaged (p + Σ e) / (c + 1),  pivotal (p + Σ (e + p) / 2) / (c + 1),  weighted (p + Σ similarity · e) / (c + 1)
//
// One block owns KEPT_TILE kept tokens of a KV head. It walks over the assignments of all evicted tokens, a run of RUN for each
// warp at a time: votes mark those that enter the block's kept tokens, and the warp writes them down in order. Then every
// warp reads what all have written, in order, takes what enters its own kept tokens, and adds AHEAD rows at a time, all on
// their way at once. So every sum is made in the order of the evicted tokens, and two runs give the same bits.
//
// In bounds: kept tokens beyond those of the call are not written; tokens are clamped; assignments outside the tile, whatever
// they are, are passed over; memory was checked on the host. MERGING is 0 averaged, 1 pivotal, 2 weighted; ROWS_ALIGNED says
// that every row begins at a multiple of 16 bytes; KEPT_TILE is a multiple of WARPS.

#pragma once

#include "select/merge_call.cuh"

constexpr u32 WARPS = 8;
// Evicted tokens that a warp looks at in a round.
constexpr u32 RUN = 1024;
static_assert(KEPT_TILE * RUN <= 1 << 16, "an entry is 16 bits");
// Rows that are on their way at once.
constexpr u32 AHEAD = 8;
// A lane owns every 32nd four channels.
constexpr u32 FOURS = HEAD_DIM / 4;
constexpr u32 OWN_FOURS = (FOURS + 31) / 32;

__device__ __forceinline__ float4 load_four(const void* rows, u64 index) {
    if constexpr (KEY_TYPE == ELEMENTS_F32 && ROWS_ALIGNED) {
        return *(const float4*)((const float*)rows + index);
    } else if constexpr (ROWS_ALIGNED) {
        const uint2 words = *(const uint2*)((const u16*)rows + index);
        const u32 bits[4] = {words.x & 0xffffu, words.x >> 16, words.y & 0xffffu, words.y >> 16};
        float x[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) x[i] = KEY_TYPE == ELEMENTS_F16 ? half_value(bits[i]) : bfloat_value(bits[i]);
        return make_float4(x[0], x[1], x[2], x[3]);
    } else {
        float x[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) x[i] = load_element(rows, KEY_TYPE, index + i);
        return make_float4(x[0], x[1], x[2], x[3]);
    }
}

// An evicted token that enters one of the tile.
struct Entry {
    u32 into;
    u32 member;
};

// What all warps share.
struct MergeShared {
    // Kept token `i` is that of warp i % WARPS alone.
    float4 sums[KEPT_TILE][FOURS];
    // What enters the tile, written down by the warp that looked at it: its place in the run, and that in the tile above it.
    u16 entries[WARPS][RUN];
    u32 written[WARPS];
    // What enters the warp's own kept tokens and waits to be added.
    Entry waiting[WARPS][32 + AHEAD];
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) merge_tokens(const MergeCall call) {
    __shared__ MergeShared shared;
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    const u32 kv_head = blockIdx.y;
    const u32 first_kept = blockIdx.x * KEPT_TILE;
    const u32 own_kept = min(KEPT_TILE, call.kept - first_kept);
    const void* rows = (const void*)call.rows;
    for (u32 i = warp; i < KEPT_TILE; i += WARPS) {
        for (u32 four = lane; four < FOURS; four += 32) shared.sums[i][four] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    // Lane i counts what enters the warp's i-th kept token.
    u32 count = 0;
    u32 waits = 0;
    Entry* waiting = shared.waiting[warp];
    const u32* kept = (const u32*)call.kept_tokens + (u64)kv_head * call.kept;
    const u32* evicted = (const u32*)call.evicted_tokens + (u64)kv_head * call.evicted;
    const u32* nearest = (const u32*)call.nearest + (u64)kv_head * call.evicted;
    const float* similarities = (const float*)call.similarities + (u64)kv_head * call.evicted;
    // Adds what waits from `first` on, at most AHEAD.
    const auto add = [&](u32 first) {
        float4 ahead[AHEAD][OWN_FOURS];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            // Those beyond the last are read again, and not added.
            const Entry entry = waiting[min(first + i, waits - 1)];
            const u64 start = row_start(call, evicted[entry.member], kv_head);
#pragma unroll
            for (u32 f = 0; f < OWN_FOURS; f++) {
                if (lane + 32 * f < FOURS) ahead[i][f] = load_four(rows, start + 4 * (lane + 32 * f));
            }
        }
        // No load moves behind this, to where it would be needed.
        asm volatile("" ::: "memory");
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            if (first + i >= waits) break;
            const Entry entry = waiting[first + i];
            const float weight = MERGING == 2 ? similarities[entry.member] : 1.0f;
            count += lane == entry.into / WARPS;
#pragma unroll
            for (u32 f = 0; f < OWN_FOURS; f++) {
                if (lane + 32 * f >= FOURS) continue;
                float4* sum = &shared.sums[entry.into][lane + 32 * f];
                const float4 before = *sum, row = ahead[i][f];
                *sum = make_float4(before.x + weight * row.x, before.y + weight * row.y, before.z + weight * row.z,
                                   before.w + weight * row.w);
            }
        }
    };
    for (u32 round = 0; round < call.evicted; round += WARPS * RUN) {
        u32 own_written = 0;
#pragma unroll 8
        for (u32 i = lane; i < RUN; i += 32) {
            const u32 member = round + warp * RUN + i;
            // Below first_kept it wraps around and is beyond the tile.
            const u32 into = member < call.evicted ? nearest[member] - first_kept : KEPT_TILE;
            const u32 votes = __ballot_sync(ALL_LANES, into < own_kept);
            if (into < own_kept) {
                shared.entries[warp][own_written + __popc(votes & ((1u << lane) - 1))] = (u16)(i | into * RUN);
            }
            own_written += __popc(votes);
        }
        if (lane == 0) shared.written[warp] = own_written;
        __syncthreads();
        for (u32 from = 0; from < WARPS; from++) {
            const u32 written = shared.written[from];
            for (u32 first = 0; first < written; first += 32) {
                const u32 at = first + lane;
                const u32 entry = at < written ? shared.entries[from][at] : 0;
                const u32 votes = __ballot_sync(ALL_LANES, at < written && entry / RUN % WARPS == warp);
                if (votes >> lane & 1) {
                    const u32 member = round + from * RUN + entry % RUN;
                    waiting[waits + __popc(votes & ((1u << lane) - 1))] = {entry / RUN, member};
                }
                waits += __popc(votes);
                __syncwarp();
                u32 added = 0;
                for (; added + AHEAD <= waits; added += AHEAD) add(added);
                // The rest moves to the front.
                const Entry rest = waiting[added + lane % AHEAD];
                __syncwarp();
                waits -= added;
                if (lane < waits) waiting[lane] = rest;
                __syncwarp();
            }
        }
        // All have read what was written down.
        __syncthreads();
    }
    if (waits > 0) add(0);
    for (u32 i = warp; i < own_kept; i += WARPS) {
        const u32 entered = __shfl_sync(ALL_LANES, count, i / WARPS);
        const float members = (float)entered;
        const u64 start = row_start(call, kept[first_kept + i], kv_head);
        float4* merged = (float4*)call.merged + ((u64)kv_head * call.kept + first_kept + i) * FOURS;
        const auto merge = [&](float x, float sum) {
            return (x + (MERGING == 1 ? 0.5f * (members * x + sum) : sum)) / (members + 1.0f);
        };
        for (u32 four = lane; four < FOURS; four += 32) {
            float4 x = load_four(rows, start + 4 * four);
            if (entered > 0) {
                const float4 sum = shared.sums[i][four];
                x = make_float4(merge(x.x, sum.x), merge(x.y, sum.y), merge(x.z, sum.z), merge(x.w, sum.w));
            }
            merged[four] = x;
        }
    }
}
