// gather: the kept tokens of every KV head, in the order of their indices.
//
//   gathered[head][i] = rows[indices[head][i]][head]
//
// reorder_chunks: tokens chunk by chunk in another order. Tokens after the last whole chunk stay in place.
//
//   reordered[head][i · C + j] = rows[order[i] · C + j][head],  C = chunk_tokens
//
// One thread owns one element of the result, of ELEMENT_BYTES bytes, and copies its bits; neighbours own neighbours, so
// rows are read and written coalesced.
//
// In bounds: threads beyond the result return; indices are clamped to the tokens of the call; rows, indices and result
// were checked on the host.

#pragma once

#include "common/ptx.cuh"

struct MoveCall {
    u64 rows;
    u64 indices;
    u64 moved;
    u64 token_stride;
    u64 head_stride;
    u32 tokens;
    u32 kv_heads;
    // Rows of the result per head.
    u32 count;
    u32 chunk_tokens;
    u32 chunks;
    u32 unused;
};

template <bool CHUNKS>
__device__ __forceinline__ void move_element(const MoveCall& call) {
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u32 channel = (u32)(index % HEAD_DIM);
    const u64 row = index / HEAD_DIM;
    if (row >= (u64)call.count * call.kv_heads) return;
    const u32 place = (u32)(row % call.count);
    u32 token = place;
    if (!CHUNKS) {
        token = ((const u32*)call.indices)[row];
    } else if (place / call.chunk_tokens < call.chunks) {
        token = ((const u32*)call.indices)[place / call.chunk_tokens] * call.chunk_tokens + place % call.chunk_tokens;
    }
    const u64 from = min(token, call.tokens - 1) * call.token_stride + row / call.count * call.head_stride + channel;
    if (ELEMENT_BYTES == 4) {
        ((u32*)call.moved)[index] = ((const u32*)call.rows)[from];
    } else {
        ((u16*)call.moved)[index] = ((const u16*)call.rows)[from];
    }
}

extern "C" __global__ void gather(const MoveCall call) { move_element<false>(call); }

extern "C" __global__ void reorder_chunks(const MoveCall call) { move_element<true>(call); }
