// Slot `logits`: what becomes of a tile's scores before the softmax. By default they are its logits.
//
// needs: WorkItem
// gives: finish_scores

fn finish_scores(item: WorkItem, tile: u32, lane: u32) {}

// -------- bent --------

// Scores that a soft cap bends, and tokens that are hidden from the query.
//
//   s -> SOFT_CAP · tanh(s / SOFT_CAP)   where CAPPED is 1 and s is finite,
//   LOWEST                               where MASKED is 1 and the token's bit is 0, or MASKED is 2 and it lies before
//                                        the window
//
// Scores and cap are in units of log2. NaN and infinities stay what they are, so that the outputs of their query head
// are NaN.
//
// The bits of an item lie behind the pages in the page table, four words for every tile, the lowest bit of a word
// first: token r + 32 · i of a tile is bit r of word i, that of lane r. Of an item in which a window begins, the first
// `scores` tokens are hidden. Every masked item has a token that its one query sees.
//
// In bounds: the index of the bits is clamped to the last four words of the table, which has as many where items are
// masked; `exp2` takes at most 2 · 10 · LOG2_E, and the divisor is above 1.
//
// needs: HEADS, LANE_TOKENS, LOG2_E, LOWEST, TILE_TOKENS, WorkItem, page_table, token_scores
// gives: finish_scores
// set by plans: CAPPED, MASKED, SOFT_CAP

const CAPPED: u32 = 1u;
// `ItemMask` of the plan.
const MASKED: u32 = 1u;
const SOFT_CAP: f32 = 50f;
// Beyond it tanh is 1 in f32.
const TANH_END: f32 = 10f;
// Below it three terms of tanh are exact to a bit, and the quotient loses digits: all of them where a cap is far above
// the scores.
const TANH_NEAR: f32 = 0.1f;
const EXPONENT_BITS: u32 = 0x7f800000u;

fn finish_scores(item: WorkItem, tile: u32, lane: u32) {
    if (CAPPED == 1u) {
        // unroll
        for (var i = 0u; i < HEADS * LANE_TOKENS; i++) {
            let score = token_scores[i];
            let x = clamp(score / SOFT_CAP, -TANH_END, TANH_END);
            let e = exp2(2f * LOG2_E * x);
            let square = x * x;
            let near = x * (1f - square * (1f / 3f - square * (2f / 15f)));
            let bent = SOFT_CAP * select((e - 1f) / (e + 1f), near, abs(x) < TANH_NEAR);
            let is_finite = (bitcast<u32>(score) & EXPONENT_BITS) != EXPONENT_BITS;
            token_scores[i] = select(score, bent, is_finite);
        }
    }
    if (MASKED == 1u) {
        let bits = min(item.scores + tile * 4u, arrayLength(&page_table) - 4u);
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            if (((page_table[bits + i] >> lane) & 1u) == 0u) {
                // unroll
                for (var head = 0u; head < HEADS; head++) {
                    token_scores[head * LANE_TOKENS + i] = LOWEST;
                }
            }
        }
    }
    if (MASKED == 2u) {
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            if (tile * TILE_TOKENS + i * 32u + lane < item.scores) {
                // unroll
                for (var head = 0u; head < HEADS; head++) {
                    token_scores[head * LANE_TOKENS + i] = LOWEST;
                }
            }
        }
    }
}
