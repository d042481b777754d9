// merge_tokens: merges into every kept row the evicted rows whose nearest kept row it is, c to one.
//
//   averaged (p + Σ e) / (c + 1),  pivotal (p + Σ (e + p) / 2) / (c + 1),  weighted (p + Σ similarity · e) / (c + 1)
//
// One warp owns a kept token, and a lane owns four channels of every 128. The warp reads its list of members, written
// by merge_members, 32 at a time and adds their rows in order, with AHEAD loads in flight: 4 bytes of f32 or 2 of f16
// per element, read once. The whole block handles a token with more than LONG members: every warp adds an equal part of
// the list, and the owner adds the parts in order. The order of the sums depends on the lists alone, so two runs give
// the same bits.
//
// In bounds: warps beyond the kept tokens have empty lists and write nothing; ends ascend and are at most `evicted`
// (merge_members); tokens are clamped; memory was checked on the host. MERGING is 0 averaged, 1 pivotal, 2 weighted;
// ROWS_ALIGNED says that every row begins at a multiple of 16 bytes.

#pragma once

#include "select/merge_call.cuh"

constexpr u32 WARPS = 8;
// Members that one warp adds by itself.
constexpr u32 LONG = 256;
// Rows in flight at once. It divides 32.
constexpr u32 AHEAD = 8;
// Groups of four channels in a row. A lane owns every 32nd group.
constexpr u32 FOURS = HEAD_DIM / 4;
constexpr u32 OWN_FOURS = (FOURS + 31) / 32;

// A lane's part of a row.
struct OwnRow {
    float4 of[OWN_FOURS];
};

// A lane's part of a row in its stored type, so that rows in flight need no more registers than they have bytes.
struct StoredRow {
    u32 words[OWN_FOURS][KEY_TYPE == ELEMENTS_F32 ? 4 : 2];
};

__device__ __forceinline__ StoredRow load_row(const MergeCall& call, u32 token, u32 kv_head, u32 lane) {
    const u64 start = row_start(call, token, kv_head);
    StoredRow row = {};
#pragma unroll
    for (u32 f = 0; f < OWN_FOURS; f++) {
        if (FOURS % 32 != 0 && lane + 32 * f >= FOURS) continue;
        const u64 index = start + 4 * (lane + 32 * f);
        u32* words = row.words[f];
        if constexpr (KEY_TYPE == ELEMENTS_F32) {
            const u32* from = (const u32*)call.rows + index;
            const uint4 four = ROWS_ALIGNED ? *(const uint4*)from : make_uint4(from[0], from[1], from[2], from[3]);
            words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
        } else {
            const u16* from = (const u16*)call.rows + index;
            const uint2 four =
                ROWS_ALIGNED ? *(const uint2*)from : make_uint2(from[0] | from[1] << 16, from[2] | from[3] << 16);
            words[0] = four.x, words[1] = four.y;
        }
    }
    return row;
}

__device__ __forceinline__ OwnRow row_values(const StoredRow& row) {
    OwnRow values;
#pragma unroll
    for (u32 f = 0; f < OWN_FOURS; f++) {
        float x[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if constexpr (KEY_TYPE == ELEMENTS_F32) {
                x[i] = __uint_as_float(row.words[f][i]);
            } else {
                const u32 bits = row.words[f][i / 2] >> 16 * (i % 2) & 0xffffu;
                x[i] = KEY_TYPE == ELEMENTS_F16 ? half_value(bits) : bfloat_value(bits);
            }
        }
        values.of[f] = make_float4(x[0], x[1], x[2], x[3]);
    }
    return values;
}

// sums += weight · row.
__device__ __forceinline__ void add_row(OwnRow& sums, float weight, const OwnRow& row) {
#pragma unroll
    for (u32 f = 0; f < OWN_FOURS; f++) {
        const float4 before = sums.of[f], x = row.of[f];
        sums.of[f] = make_float4(before.x + weight * x.x, before.y + weight * x.y, before.z + weight * x.z,
                                 before.w + weight * x.w);
    }
}

// Adds the rows of members `first` to `end` of a KV head, in order.
__device__ __forceinline__ OwnRow add_members(const MergeCall& call, u32 kv_head, u32 first, u32 end, u32 lane) {
    const MergeMember* members = (const MergeMember*)call.members + (u64)kv_head * call.evicted;
    OwnRow sums = {};
    if (first >= end) return sums;
    // Each lane holds one of 32 members, and one of the next 32.
    MergeMember next = members[min(first + lane, end - 1)];
    for (u32 at = first; at < end; at += 32) {
        const MergeMember known = next;
        if (at + 32 < end) next = members[min(at + 32 + lane, end - 1)];
        const u32 here = min(32u, end - at);
        for (u32 i = 0; i < here; i += AHEAD) {
            StoredRow ahead[AHEAD];
#pragma unroll
            for (u32 j = 0; j < AHEAD; j++) {
                const u32 token = __shfl_sync(ALL_LANES, known.token, i + j);
                if (i + j < here) ahead[j] = load_row(call, token, kv_head, lane);
            }
            // Keeps loads from moving behind this point, to where they would be needed.
            asm volatile("" ::: "memory");
#pragma unroll
            for (u32 j = 0; j < AHEAD; j++) {
                const float similarity = MERGING == 2 ? __shfl_sync(ALL_LANES, known.similarity, i + j) : 1.0f;
                if (i + j < here) add_row(sums, similarity, row_values(ahead[j]));
            }
        }
    }
    return sums;
}

// Memory that all warps share.
struct MergeShared {
    // The ends of the lists of the block's kept tokens.
    u32 first[WARPS];
    u32 end[WARPS];
    // For a long list: the sums of every warp's part.
    float4 parts[WARPS][32 * OWN_FOURS];
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) merge_tokens(const MergeCall call) {
    __shared__ MergeShared shared;
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    const u32 kv_head = blockIdx.y;
    const u32 own = blockIdx.x * WARPS + warp;
    const bool exists = own < call.kept;
    const u32* ends = (const u32*)call.ends + (u64)kv_head * call.kept;
    const u32 first = exists && own > 0 ? ends[own - 1] : 0;
    const u32 end = exists ? ends[own] : 0;
    const u32 kept = exists ? ((const u32*)call.kept_tokens)[(u64)kv_head * call.kept + own] : 0;
    const StoredRow stored = load_row(call, kept, kv_head, lane);
    if (lane == 0) {
        shared.first[warp] = first;
        shared.end[warp] = end;
    }
    OwnRow sums = add_members(call, kv_head, first, end - first > LONG ? first : end, lane);
    __syncthreads();
    for (u32 owner = 0; owner < WARPS; owner++) {
        const u32 of_owner = shared.end[owner] - shared.first[owner];
        if (of_owner <= LONG) continue;
        const u32 part = (of_owner + WARPS - 1) / WARPS;
        const u32 from = shared.first[owner] + min(warp * part, of_owner);
        const u32 to = shared.first[owner] + min((warp + 1) * part, of_owner);
        const OwnRow own_part = add_members(call, kv_head, from, to, lane);
#pragma unroll
        for (u32 f = 0; f < OWN_FOURS; f++) shared.parts[warp][lane + 32 * f] = own_part.of[f];
        __syncthreads();
        if (warp == owner) {
            for (u32 other = 0; other < WARPS; other++) {
                OwnRow of_other;
#pragma unroll
                for (u32 f = 0; f < OWN_FOURS; f++) of_other.of[f] = shared.parts[other][lane + 32 * f];
                add_row(sums, 1.0f, of_other);
            }
        }
        __syncthreads();
    }
    if (!exists) return;
    const OwnRow pivot = row_values(stored);
    const u32 entered = end - first;
    const float members = (float)entered;
    const auto merge = [&](float x, float sum) {
        return (x + (MERGING == 1 ? 0.5f * (members * x + sum) : sum)) / (members + 1.0f);
    };
    float4* merged = (float4*)call.merged + ((u64)kv_head * call.kept + own) * FOURS;
#pragma unroll
    for (u32 f = 0; f < OWN_FOURS; f++) {
        if (lane + 32 * f >= FOURS) continue;
        const float4 x = pivot.of[f], sum = sums.of[f];
        // A row without members stays unchanged.
        const float4 with = make_float4(merge(x.x, sum.x), merge(x.y, sum.y), merge(x.z, sum.z), merge(x.w, sum.w));
        merged[lane + 32 * f] = entered > 0 ? with : x;
    }
}
