// Weights of one byte, shared by all channels.
//
// needs: HEADS, LANE_TOKENS, LARGEST_WEIGHT_UNIT, TWO_TO_23, store_bytes, token_scores
// gives: BLOCK_MAXIMA, weigh, store_weights

// import block_max = attend/block_max/atomic.wgsl
// import value_ranges = attend/value_ranges/folded.wgsl

// Maxima of a block: of the scores of every head.
const BLOCK_MAXIMA: u32 = HEADS;

// The four weights of the invocation, and the scale of its block: [head].
var<private> own_bytes: array<u32, HEADS>;
var<private> own_scales: array<f32, HEADS>;

// Sets the weights of a head's tokens and returns their sum, relative to the new running maximum.
fn weigh(head: u32, step_max: f32, new_max: f32, parity: u32, team: u32, lane: u32) -> f32 {
    let largest = block_max(head, parity, team, lane);
    // Rounded to nearest in the low bits of 2^23 + weight. Shifting drops the bits of 2^23 except one byte.
    var bytes = 0u;
    // unroll
    for (var i = 0u; i < LANE_TOKENS; i++) {
        let rounded = exp2(token_scores[head * LANE_TOKENS + i] - largest) * 255f + 8388608f;
        bytes += bitcast<u32>(rounded) << (8u * i);
    }
    bytes -= TWO_TO_23;
    own_bytes[head] = bytes;
    // Sums of weights count 1 for a weight of 255, as in other segments, because the states are merged.
    own_scales[head] = exp2(largest - new_max) * LARGEST_WEIGHT_UNIT;
    let weights = dot4U8Packed(bytes, 0x01010101u);
    enter_weights(head, weights, parity, team, lane);
    return (bitcast<f32>(weights + TWO_TO_23) - 8388608f) * own_scales[head];
}

fn store_weights(team: u32, lane: u32, parity: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        store_bytes(0u, head, team, lane, own_bytes[head], own_scales[head]);
    }
}
