// From scores to logits: a soft cap, hidden tokens, and sinks. What a launch needs none of is not compiled into it.
//
//   s -> cap · tanh(s / cap) where CAPPED,  HIDDEN where MASKED hides the token,
//   a sink is a logit without a value: it is joined once, where the output of a query is written
//
// Everything is in units of log2. MASKED 1: an item's tokens before `seen` are hidden. MASKED 2: from token `seen` on
// the bits of a tree decide, at most 64 of them, the lowest bits in `extremes` and the others in `stride`. Both are of
// items of one query, which sees one of their tokens at least.

#pragma once

#include "common/ptx.cuh"
#include "common/attend_call.cuh"

// The score of a hidden token: far below all others, and finite, so that passes of hidden tokens alone have a largest
// score. What they add is multiplied by 0 as soon as there is another.
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
        const u64 bits = (u64)item.stride << 32 | item.extremes;
        return bit >= 0 && (bit >= 64 || (bits >> bit & 1u) == 0u);
    }
    return false;
}
