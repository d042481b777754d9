// From scores to logits: a soft cap, hidden tokens, and sinks. What a launch needs none of is not compiled into it.
//
//   s -> cap · tanh(s / cap) where CAPPED,  HIDDEN where MASKED hides the token,
//   a sink is a logit without a value: it is joined once, where the output of a query is written
//
// Everything is in units of log2. MASKED 1: an item's tokens before `seen` are hidden. MASKED 2: from token `seen` on
// the bits of a tree decide. Both are of items of one query.

#pragma once

#include "common/ptx.cuh"
#include "common/attend_call.cuh"

// The score of a hidden token: far below all others, and finite, so that passes of hidden tokens alone have a largest
// score. What they add is multiplied by 0 as soon as there is another; where there is none, write_output writes 0.
constexpr float HIDDEN = -1e30f;

__device__ __forceinline__ float capped(const AttendCall& call, float score) {
    const float x = score / call.soft_cap;
    // Beyond 10 it is 1 in f32; NaN stays NaN.
    const float bounded = x > 10.0f ? 10.0f : x < -10.0f ? -10.0f : x;
    const float e = exp2_approx(2.885390082f * bounded);
    return call.soft_cap * ((e - 1.0f) / (e + 1.0f));
}

// Whether token `token` of the item is hidden.
__device__ __forceinline__ bool is_hidden(const Item& item, int token) {
    if constexpr (MASKED == 1) return token < item.seen;
    if constexpr (MASKED == 2) {
        const int bit = token - item.seen;
        // Chosen, not indexed: the words stay in registers.
        const u32 word = bit < 64 ? (bit < 32 ? item.tree[0] : item.tree[1]) : bit < 96 ? item.tree[2] : item.tree[3];
        return bit >= 0 && (word >> (bit & 31) & 1u) == 0u;
    }
    return false;
}
