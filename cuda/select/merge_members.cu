// merge_members: lists, in order, the evicted tokens that merge into each kept token, which is their nearest.
//
//   members[ends[i - 1] .. ends[i]] = the evicted tokens j with nearest_j = i, ascending
//
// One block owns MEMBER_TILE kept tokens of a KV head, and each of its warps owns a contiguous range of all
// assignments. The block reads the assignments twice. First every warp counts the members of each kept token in its
// range, and the block counts the assignments to tokens before its tile. These counts give the place of every warp's
// members of every kept token. Then every warp writes its members there, in order. Counts are integers, so two runs
// give the same lists. Assignments are read 2 ⌈kept / MEMBER_TILE⌉ times, from the cache.
//
// In bounds: places are counts of assignments, of which there are as many as members; assignments to tokens that are
// not kept, whatever they are, are in no list; memory was checked on the host.

#pragma once

#include "select/merge_call.cuh"

constexpr u32 MEMBER_WARPS = 32;
// Kept tokens of a block: as many as a warp has counts for. 32 KiB of shared memory.
constexpr u32 MEMBER_TILE = 256;

// Memory that all warps share.
struct MembersShared {
    // First the number of members that a kept token has in a warp's range, then the place of the next one.
    u32 places[MEMBER_WARPS][MEMBER_TILE];
    // Assignments to kept tokens before the tile, for every range.
    u32 before[MEMBER_WARPS];
    // Members of every 32 kept tokens.
    u32 of_lanes[MEMBER_TILE / 32];
};

__device__ __forceinline__ u32 sum_of_lanes(u32 x) {
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
    return x;
}

// The sum over this lane and all lanes before it.
__device__ __forceinline__ u32 sum_up_to(u32 x, u32 lane) {
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(ALL_LANES, x, distance);
        if (lane >= distance) x += other;
    }
    return x;
}

// Turns counts into places, and writes the ends of the members of every kept token.
__device__ void place_members(MembersShared& shared, const MergeCall& call, u32 kv_head, u32 first_kept) {
    const u32 lane = threadIdx.x % 32;
    const u32 own = threadIdx.x;
    u32 members = 0;
    if (own < MEMBER_TILE) {
        for (u32 warp = 0; warp < MEMBER_WARPS; warp++) {
            const u32 of_run = shared.places[warp][own];
            shared.places[warp][own] = members;
            members += of_run;
        }
    }
    const u32 up_to = sum_up_to(members, lane);
    if (own < MEMBER_TILE && lane == 31) shared.of_lanes[own / 32] = up_to;
    __syncthreads();
    if (own >= MEMBER_TILE) return;
    u32 first = sum_of_lanes(shared.before[lane]) + up_to - members;
    for (u32 i = 0; i < own / 32; i++) first += shared.of_lanes[i];
    for (u32 warp = 0; warp < MEMBER_WARPS; warp++) shared.places[warp][own] += first;
    if (first_kept + own < call.kept) ((u32*)call.ends)[(u64)kv_head * call.kept + first_kept + own] = first + members;
}

extern "C" __global__ void __launch_bounds__(32 * MEMBER_WARPS) merge_members(const MergeCall call) {
    __shared__ MembersShared shared;
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    const u32 kv_head = blockIdx.y;
    const u32 first_kept = blockIdx.x * MEMBER_TILE;
    const u32 own_kept = min(MEMBER_TILE, call.kept - first_kept);
    const u32* nearest = (const u32*)call.nearest + (u64)kv_head * call.evicted;
    const float* similarities = (const float*)call.similarities + (u64)kv_head * call.evicted;
    const u32* evicted = (const u32*)call.evicted_tokens + (u64)kv_head * call.evicted;
    MergeMember* members = (MergeMember*)call.members + (u64)kv_head * call.evicted;
    const u32 run = (call.evicted + MEMBER_WARPS - 1) / MEMBER_WARPS;
    const u32 first = min(warp * run, call.evicted);
    const u32 end = min(first + run, call.evicted);
    u32* places = shared.places[warp];
    for (u32 i = lane; i < MEMBER_TILE; i += 32) places[i] = 0;
    __syncwarp();
    u32 before = 0;
#pragma unroll 8
    for (u32 at = first + lane; at < end; at += 32) {
        const u32 into = nearest[at];
        before += into < first_kept;
        // An assignment below first_kept wraps around and falls beyond the tile.
        if (into - first_kept < own_kept) atomicAdd(&places[into - first_kept], 1);
    }
    before = sum_of_lanes(before);
    if (lane == 0) shared.before[warp] = before;
    __syncthreads();
    place_members(shared, call, kv_head, first_kept);
    __syncthreads();
#pragma unroll 4
    for (u32 round = first; round < end; round += 32) {
        const u32 at = round + lane;
        const u32 into = (at < end ? nearest[at] : first_kept + own_kept) - first_kept;
        const bool enters = into < own_kept;
        if (!__any_sync(ALL_LANES, enters)) continue;
        // The lanes whose tokens merge into the same kept token. Those before this lane come first.
        const u32 together = __match_any_sync(ALL_LANES, enters ? into : MEMBER_TILE);
        const u32 place = enters ? places[into] + __popc(together & ((1u << lane) - 1)) : 0;
        __syncwarp();
        if (enters) {
            if (together >> lane == 1) places[into] = place + 1;
            members[place] = {evicted[at], similarities[at]};
        }
        __syncwarp();
    }
}
