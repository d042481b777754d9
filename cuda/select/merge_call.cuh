// Arguments of the kernels that merge evicted tokens into kept ones.

#pragma once

#include "common/ptx.cuh"
#include "common/elements.cuh"

// An evicted token that merges into a kept one, and the similarity of their keys.
struct MergeMember {
    u32 token;
    float similarity;
};

struct MergeCall {
    u64 rows;
    u64 token_stride;
    u64 head_stride;
    // [kv_head][kept] and [kv_head][evicted].
    u64 kept_tokens;
    u64 evicted_tokens;
    // Inverse norms of the kept tokens.
    u64 inverse_norms;
    // [kv_head][evicted]: index into the kept tokens, and cosine similarity.
    u64 nearest;
    u64 similarities;
    // [kv_head][kept]: the end of a kept token's members in `members`. They begin where those of the previous one end.
    u64 ends;
    // [kv_head][evicted], of `MergeMember`.
    u64 members;
    // [kv_head][kept][HEAD_DIM], f32.
    u64 merged;
    u32 tokens;
    u32 kv_heads;
    // Kept and evicted tokens of each head.
    u32 kept;
    u32 evicted;
};

// Index of the first element of a row. Tokens that do not exist are clamped.
__device__ __forceinline__ u64 row_start(const MergeCall& call, u32 token, u32 kv_head) {
    return min(token, call.tokens - 1) * call.token_stride + kv_head * call.head_stride;
}
