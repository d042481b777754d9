// nearest_kept: for every evicted token the kept token whose key has the largest cosine similarity. Ties go to the
// first.
//
//   nearest = argmax_i (key · kept_i) / ‖kept_i‖,  similarity = (key · kept_nearest) / (‖kept_nearest‖ ‖key‖)
//
// kept_norms first writes 1 / ‖kept_i‖, or 0 for a key of zeros. One warp owns a row.
//
// Then one block owns WARPS · WARP_ROWS evicted tokens of a KV head. A warp holds its own as MMA operands in registers,
// and all kept keys stream through shared memory in order. Loads of later groups of eight keys run while earlier ones
// are multiplied. A lane remembers the best of its columns, and the four lanes of a quad agree at the end. Ties go to
// the lower index. No atomics.
//
// In bounds: evicted and kept tokens beyond those of the call are not read; tokens are clamped; memory was checked on
// the host. KEY_TYPE and QUERY_TYPE are both the type of the keys.

#pragma once

#include "select/key_tile.cuh"
#include "select/merge_call.cuh"

// Kept rows that are staged at once, up to 16 KiB.
constexpr u32 EIGHTS = 1024 / EIGHT_LOADS / AT_ONCE * AT_ONCE;
constexpr u32 STAGED = 8 * EIGHTS;
constexpr u32 OWN_LOADS = (EIGHTS * PAIRS + WARPS - 1) / WARPS;

extern "C" __global__ void kept_norms(const MergeCall call) {
    const u32 index = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const u32 lane = threadIdx.x % 32;
    if (index >= call.kept * call.kv_heads) return;
    const u64 start = row_start(call, ((const u32*)call.kept_tokens)[index], index / call.kept);
    float square = 0.0f;
    for (u32 channel = lane; channel < HEAD_DIM; channel += 32) {
        const float x = load_element((const void*)call.rows, KEY_TYPE, start + channel);
        square += x * x;
    }
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) square += __shfl_xor_sync(ALL_LANES, square, distance);
    if (lane == 0) ((float*)call.inverse_norms)[index] = square > 0.0f ? 1.0f / sqrtf(square) : 0.0f;
}

// The kept tokens whose channels a lane stages in one stage.
struct KeptRows {
    u32 token[OWN_LOADS];
};

// The row of the stage that a load belongs to.
__device__ __forceinline__ u32 staged_row(u32 load) {
    return (threadIdx.x / 32 + load * WARPS) / PAIRS * 8 + threadIdx.x % 32 / 4;
}

// Reads the tokens of `first` and the rows after it. This happens well before they are staged, so that nothing waits
// for it.
__device__ __forceinline__ void find_kept(KeptRows& kept, const MergeCall& call, u32 first, u32 kv_head) {
#pragma unroll
    for (u32 i = 0; i < OWN_LOADS; i++) {
        const u32 row = min(first + staged_row(i), call.kept - 1);
        kept.token[i] = ((const u32*)call.kept_tokens)[(u64)kv_head * call.kept + row];
    }
}

// Starts loads of kept rows, from `first` on, and of their inverse norms to shared memory. Rows that do not exist hold
// unspecified values.
__device__ __forceinline__ void stage_kept(uint4* staged, float* norms, const MergeCall& call, const KeptRows& kept,
                                           u32 first, u32 kv_head) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 i = 0; i < OWN_LOADS; i++) {
        const u32 load = threadIdx.x / 32 + i * WARPS;
        if (EIGHTS * PAIRS % WARPS != 0 && load >= EIGHTS * PAIRS) break;
        const bool exists = first + staged_row(i) < call.kept;
        const u64 start = row_start(call, kept.token[i], kv_head);
        stage_passing(staged + load / PAIRS * EIGHT_LOADS, load % PAIRS, (const void*)call.rows, start, exists, lane);
    }
    if (threadIdx.x < STAGED && first + threadIdx.x < call.kept) {
        const float* inverse = (const float*)call.inverse_norms + (u64)kv_head * call.kept;
        copy_4_async_or_zeros(shared_address(norms + threadIdx.x), inverse + first + threadIdx.x, true);
    }
    copies_commit();
}

// The best of a lane's columns, for each of its rows.
struct Best {
    float similarity[SLOTS];
    u32 nearest[SLOTS];
};

__device__ __forceinline__ void compare(Best& best, const float (&products)[M_TILES][4], const float* norms, u32 first,
                                        u32 lane) {
    const float2 norm = *(const float2*)&norms[2 * (lane % 4)];
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) {
#pragma unroll
        for (u32 column = 0; column < 2; column++) {
            const float similarity = products[i / 2][2 * (i % 2) + column] * (column ? norm.y : norm.x);
            if (similarity > best.similarity[i]) {
                best.similarity[i] = similarity;
                best.nearest[i] = first + 2 * (lane % 4) + column;
            }
        }
    }
}

// 1 / ‖row‖ of the lane's rows, or 0 for a row of zeros.
__device__ __forceinline__ void resident_norms(float (&norms)[SLOTS], const Resident& resident) {
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) {
        float square = 0.0f;
#pragma unroll
        for (u32 f = 0; f < 4 * PAIRS; f++) {
            const u32 at = i % 2 + 2 * (f % 2);
            const u32 high = resident.high[i / 2][f / 2][at];
            float x = half_value(high & 0xffffu), y = half_value(high >> 16);
            if constexpr (KEYS_SPLIT) {
                const u32 low = resident.low[i / 2][f / 2][at];
                x += half_value(low & 0xffffu), y += half_value(low >> 16);
            }
            square += x * x + y * y;
        }
        square += __shfl_xor_sync(ALL_LANES, square, 1);
        square += __shfl_xor_sync(ALL_LANES, square, 2);
        norms[i] = square > 0.0f ? 1.0f / sqrtf(square) : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) nearest_kept(const MergeCall call) {
    __shared__ uint4 staged[2][EIGHTS * EIGHT_LOADS];
    __shared__ __align__(16) float norms[2][STAGED];
    const u32 lane = threadIdx.x % 32;
    const u32 kv_head = blockIdx.y;
    const u32 first_row = (blockIdx.x * WARPS + threadIdx.x / 32) * WARP_ROWS;
    const u32* evicted = (const u32*)call.evicted_tokens + (u64)kv_head * call.evicted;
    KeptRows kept;
    find_kept(kept, call, 0, kv_head);
    stage_kept(staged[0], norms[0], call, kept, 0, kv_head);
    find_kept(kept, call, STAGED, kv_head);
    Resident resident;
#pragma unroll
    for (u32 m = 0; m < M_TILES; m++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 row = first_row + 16 * m + 8 * half + lane / 4;
            const bool exists = row < call.evicted;
            const u64 start = exists ? row_start(call, evicted[row], kv_head) : 0;
            load_resident_row(resident, m, half, (const void*)call.rows, start, exists, lane);
        }
    }
    Best best;
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) {
        best.similarity[i] = -3.4028234e38f;
        best.nearest[i] = 0;
    }
    const u32 stages = (call.kept + STAGED - 1) / STAGED;
    for (u32 stage = 0; stage < stages; stage++) {
        copies_wait<0>();
        if (WARPGROUPS) shared_visible();
        // All threads have read the previous stage.
        __syncthreads();
        const u32 at = stage % 2;
        const u32 first = stage * STAGED;
        if (stage + 1 < stages) {
            stage_kept(staged[1 - at], norms[1 - at], call, kept, first + STAGED, kv_head);
            find_kept(kept, call, first + 2 * STAGED, kv_head);
        }
        // A NaN norm keeps a row that does not exist from winning any comparison.
        if (stage + 1 == stages && threadIdx.x < STAGED && first + threadIdx.x >= call.kept) {
            norms[at][threadIdx.x] = __uint_as_float(0x7fffffffu);
        }
        if (stage + 1 == stages) __syncthreads();
#pragma unroll 1
        for (u32 eight = 0; eight < EIGHTS; eight += AT_ONCE) {
            Products products;
            multiply_staged(products, resident, staged[at] + eight * EIGHT_LOADS, lane);
#pragma unroll
            for (u32 e = 0; e < AT_ONCE; e++) {
                compare(best, products.of[e], norms[at] + 8 * (eight + e), first + 8 * (eight + e), lane);
            }
        }
    }
    float own_norms[SLOTS];
    resident_norms(own_norms, resident);
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) {
#pragma unroll
        for (u32 distance = 1; distance < 4; distance *= 2) {
            const float other = __shfl_xor_sync(ALL_LANES, best.similarity[i], distance);
            const u32 other_nearest = __shfl_xor_sync(ALL_LANES, best.nearest[i], distance);
            if (other > best.similarity[i] || (other == best.similarity[i] && other_nearest < best.nearest[i])) {
                best.similarity[i] = other;
                best.nearest[i] = other_nearest;
            }
        }
        const u32 row = first_row + 8 * i + lane / 4;
        if (lane % 4 == 0 && row < call.evicted) {
            const u64 index = (u64)kv_head * call.evicted + row;
            ((u32*)call.nearest)[index] = best.nearest[i];
            ((float*)call.similarities)[index] = best.similarity[i] * own_norms[i];
        }
    }
}
