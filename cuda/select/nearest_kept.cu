// nearest_kept: for every evicted token the kept one whose key has the largest cosine similarity; of equal ones the first.
//
//   nearest = argmax_i (key · kept_i) / ‖kept_i‖,  similarity = (key · kept_nearest) / (‖kept_nearest‖ ‖key‖)
//
// kept_norms writes 1 / ‖kept_i‖ and 1 / ‖key‖ first, or 0 of a key of zeros: one warp owns a row.
//
// Then one block owns TILE_ROWS evicted tokens of a KV head; a warp holds its own as MMA operands in registers, and all kept
// keys pass by through shared memory in order. A lane remembers the best of the columns it owns, and the four lanes of a
// quad agree at the end: of equal similarities the lower index. No atomics.
//
// In bounds: evicted and kept tokens beyond those of the call are not read; tokens are clamped; memory was checked on the
// host. KEY_TYPE and QUERY_TYPE are both the type of the keys.

#pragma once

#include "select/key_tile.cuh"
#include "select/merge_call.cuh"

extern "C" __global__ void kept_norms(const MergeCall call) {
    const u32 index = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const u32 lane = threadIdx.x % 32;
    const u32 kept = call.kept * call.kv_heads;
    if (index >= kept + call.evicted * call.kv_heads) return;
    const bool is_kept = index < kept;
    const u32 row = is_kept ? index : index - kept;
    const u32 token = ((const u32*)(is_kept ? call.kept_tokens : call.evicted_tokens))[row];
    const u64 start = row_start(call, token, row / (is_kept ? call.kept : call.evicted));
    float square = 0.0f;
    for (u32 channel = lane; channel < HEAD_DIM; channel += 32) {
        const float x = load_element((const void*)call.rows, KEY_TYPE, start + channel);
        square += x * x;
    }
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) square += __shfl_xor_sync(ALL_LANES, square, distance);
    if (lane == 0) ((float*)call.inverse_norms)[index] = square > 0.0f ? 1.0f / sqrtf(square) : 0.0f;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) nearest_kept(const MergeCall call) {
    __shared__ StagedRows staged;
    __shared__ float norms[STAGED];
    const u32 lane = threadIdx.x % 32;
    const u32 kv_head = blockIdx.y;
    const u32 first_row = blockIdx.x * TILE_ROWS + threadIdx.x / 32 * WARP_ROWS;
    const u32* kept = (const u32*)call.kept_tokens + (u64)kv_head * call.kept;
    const u32* evicted = (const u32*)call.evicted_tokens + (u64)kv_head * call.evicted;
    const float* kept_norm = (const float*)call.inverse_norms + (u64)kv_head * call.kept;
    const float* own_norm =
        (const float*)call.inverse_norms + (u64)call.kv_heads * call.kept + (u64)kv_head * call.evicted;
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
    float best[2 * M_TILES];
    u32 nearest[2 * M_TILES];
#pragma unroll
    for (u32 i = 0; i < 2 * M_TILES; i++) {
        best[i] = -3.4028234e38f;
        nearest[i] = 0;
    }
    for (u32 first = 0; first < call.kept; first += STAGED) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < STAGED * (HEAD_DIM / 4); i += blockDim.x) {
            const u32 row = i / (HEAD_DIM / 4);
            const bool exists = first + row < call.kept;
            const u64 start = exists ? row_start(call, kept[first + row], kv_head) : 0;
            stage_four(staged, row, i % (HEAD_DIM / 4), (const void*)call.rows, start, exists);
        }
        if (threadIdx.x < STAGED) {
            norms[threadIdx.x] = first + threadIdx.x < call.kept ? kept_norm[first + threadIdx.x] : 0.0f;
        }
        __syncthreads();
        for (u32 eight = 0; eight < STAGED && first + eight < call.kept; eight += 8) {
            float products[M_TILES][4];
            multiply_staged(products, resident, staged, eight, lane);
#pragma unroll
            for (u32 column = 0; column < 2; column++) {
                const u32 row = eight + 2 * (lane % 4) + column;
#pragma unroll
                for (u32 i = 0; i < 2 * M_TILES; i++) {
                    const float similarity = products[i / 2][2 * (i % 2) + column] * norms[row];
                    if (first + row < call.kept && similarity > best[i]) {
                        best[i] = similarity;
                        nearest[i] = first + row;
                    }
                }
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < 2 * M_TILES; i++) {
#pragma unroll
        for (u32 distance = 1; distance < 4; distance *= 2) {
            const float other = __shfl_xor_sync(ALL_LANES, best[i], distance);
            const u32 other_nearest = __shfl_xor_sync(ALL_LANES, nearest[i], distance);
            if (other > best[i] || (other == best[i] && other_nearest < nearest[i])) {
                best[i] = other;
                nearest[i] = other_nearest;
            }
        }
        const u32 row = first_row + 8 * i + lane / 4;
        if (lane % 4 == 0 && row < call.evicted) {
            const u64 at = (u64)kv_head * call.evicted + row;
            ((u32*)call.nearest)[at] = nearest[i];
            ((float*)call.similarities)[at] = best[i] * own_norm[row];
        }
    }
}
