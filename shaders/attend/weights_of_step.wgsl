// Weights relative to the step's maximum, and their exact sum.
//
// needs: HEADS, LANE_TOKENS, enter, token_scores
// gives: weights, weigh

// Weights of the invocation's tokens: [head][token].
var<private> weights: array<f32, HEADS * LANE_TOKENS>;

// Sets the weights of a head's tokens and returns their sum, relative to the new running maximum.
fn weigh(head: u32, step_max: f32, new_max: f32, parity: u32, team: u32, lane: u32) -> f32 {
    var sum = 0f;
    // unroll
    for (var i = 0u; i < LANE_TOKENS; i++) {
        weights[head * LANE_TOKENS + i] = exp2(token_scores[head * LANE_TOKENS + i] - step_max);
        sum += weights[head * LANE_TOKENS + i];
    }
    return sum * enter[head];
}
