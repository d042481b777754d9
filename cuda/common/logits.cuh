// From scores to logits: a soft cap, hidden tokens, and sinks. What a launch needs none of is not compiled into it.
//
//   s -> cap · tanh(s / cap) where CAPPED,  HIDDEN where MASKED or MOVING hides the token,
//   a sink is a logit without a value: it is joined once, where the output of a query is written
//
// Everything is in units of log2. MASKED 1: an item's tokens before `seen` are hidden. MASKED 2: from token `seen` on
// the bits of a tree decide. Both are of items of one query. Where queries are MOVING, each sees the tokens up to a
// place of its own, and with MASKED 1 from one on.

#pragma once

#include "common/ptx.cuh"
#include "common/attend_call.cuh"

// The score of a hidden token: far below all others, and finite, so that passes of hidden tokens alone have a largest
// score. What they add is multiplied by 0 as soon as there is another; where there is none, write_output writes 0.
constexpr float HIDDEN = -1e30f;

__device__ __forceinline__ float capped(const AttendCall& call, float score) {
    const float x = score / call.soft_cap;
    // Beyond 10 it is 1 in f32.
    const float e = exp2_approx(2.885390082f * fminf(fmaxf(x, -10.0f), 10.0f));
    // Near 0 three terms are exact to a bit, and the quotient loses digits: all of them where a cap is far above the
    // scores.
    const float square = x * x;
    const float near = x * (1.0f - square * (0.333333333f - square * 0.133333333f));
    const float bent = fabsf(x) < 0.1f ? near : (e - 1.0f) / (e + 1.0f);
    // NaN and infinities stay what they are, so that the outputs of their query head are NaN.
    return fabsf(score) <= 3.402823466e38f ? call.soft_cap * bent : score;
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

// What a query sees of an item, if queries move: tokens from .. to.
struct SeenTokens {
    int from;
    int to;
};

__device__ __forceinline__ SeenTokens seen_tokens(const Item& item, u32 query) {
    return {item.from + (int)query, item.seen + (int)query};
}

// Hides what the lane's queries do not see of a pass. `first` is the token of its first score.
template <int SCORES>
__device__ __forceinline__ void hide_unseen(float (&scores)[SCORES], const SeenTokens (&seen)[LANE_HEADS], int first) {
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        const int token = first + 8 * (i / LANE_HEADS);
        const SeenTokens& of = seen[i % LANE_HEADS];
        if (token >= of.to || (MASKED == 1 && token < of.from)) scores[i] = HIDDEN;
    }
}
