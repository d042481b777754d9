// Slot `byte_weights`: weights of one byte, relative to the largest of their block (values.wgsl#byte).
//
// Every choice has
//   const BLOCK_MAXIMA: u32
//     maxima that a block has: of the scores of every head, and what else the choice enters
//   fn weigh(head: u32, step_max: f32, new_max: f32, parity: u32, team: u32, lane: u32) -> f32
//   fn store_weights(team: u32, lane: u32, parity: u32)
//     as in values.wgsl

// -------- groups --------

// Weights of one byte for every group of channels, with the scales multiplied in: p s as an integer 0 … 255. The block's
// largest p s over all groups is 1. In a group p s is at most the largest r of the block, where r is the scale of a
// token in this group beside its largest in any group. So r becomes 255. The rounding error of the integers multiplies
// only the middle of the codes, c̄ = (2^bits - 1) / 2:
//
//   Σ p (s c + m) ≈ Σ ŵ c + Σ (p m + (p s - ŵ) c̄)
//
// where ŵ approximates p s, and the second sum is one per head and group.
//
// needs: HEADS, LANE_TOKENS, LARGEST_WEIGHT_UNIT, TWO_TO_23, WEIGHT_GROUPS, rescale_acc, store_bytes, token_scores
// gives: BLOCK_MAXIMA, begin_value_ranges, enter_value_ranges, weigh, store_weights
// set by plans: VALUE_CENTRE

// import block_max = attend/block_max.wgsl#atomic
// import attend/value_ranges.wgsl#groups

// (2^bits - 1) / 2.
const VALUE_CENTRE: f32 = 7.5f;
// Maxima of a block: of the references of every head, and of r in every group.
const BLOCK_MAXIMA: u32 = HEADS + WEIGHT_GROUPS;

// exp2(block's maximum - running maximum).
var<private> block_units: array<f32, HEADS>;

fn begin_value_ranges(invocation: u32) {
    begin_common_sums();
}

fn enter_value_ranges(parity: u32, team: u32, lane: u32) {
    let inverses = 1f / max(largest_scales(), vec4<f32>(1e-30f));
    // unroll
    for (var group = 0u; group < WEIGHT_GROUPS; group++) {
        let r = group_scales(group) * inverses;
        enter_block_max(HEADS + group, max(max(r.x, r.y), max(r.z, r.w)), parity, team, lane);
    }
}

// Stores the weights of a head's tokens in place of their scores and returns their sum, relative to the new running
// maximum.
fn weigh(head: u32, step_max: f32, new_max: f32, parity: u32, team: u32, lane: u32) -> f32 {
    let largest = block_max(head, parity, team, lane);
    var sum = 0f;
    // unroll
    for (var i = 0u; i < LANE_TOKENS; i++) {
        token_scores[head * LANE_TOKENS + i] = exp2(token_scores[head * LANE_TOKENS + i] - largest);
        sum += token_scores[head * LANE_TOKENS + i];
    }
    block_units[head] = exp2(largest - new_max);
    return sum * block_units[head];
}

fn store_weights(team: u32, lane: u32, parity: u32) {
    // unroll
    for (var group = 0u; group < WEIGHT_GROUPS; group++) {
        let scales = group_scales(group);
        let largest = block_max(HEADS + group, parity, team, lane);
        // If every scale of the group in the block is 0, all weights are 0.
        let integers = scales * (255f / max(largest, 1e-30f));
        let unit = largest * LARGEST_WEIGHT_UNIT;
        let centres = group_minima(group) + VALUE_CENTRE * scales;
        // unroll
        for (var head = 0u; head < HEADS; head++) {
            let p = vec4<f32>(token_scores[head * 4u], token_scores[head * 4u + 1u], token_scores[head * 4u + 2u], token_scores[head * 4u + 3u]);
            // Rounded to nearest in the low bits of 2^23 + weight. Shifting drops the bits of 2^23 except one byte, 75.
            // Adding 181 wraps it around.
            let weights = min(p * integers, vec4<f32>(255f));
            let rounded = bitcast<vec4<u32>>(weights + vec4<f32>(8388608f, 8388608f, 8388608f, 8388789f));
            let bytes = rounded.x + (rounded.y << 8u) + (rounded.z << 16u) + (rounded.w << 24u);
            store_bytes(group, head, team, lane, bytes, unit * block_units[head]);
            let sum = bitcast<f32>(dot4U8Packed(bytes, 0x01010101u) + TWO_TO_23) - 8388608f;
            let left = dot(p, centres) - sum * (unit * VALUE_CENTRE);
            let at = group * HEADS + head;
            common_sums[at] = common_sums[at] * rescale_acc[head] + left * block_units[head];
        }
    }
}

// -------- shared --------

// Weights of one byte, shared by all channels.
//
// needs: HEADS, LANE_TOKENS, LARGEST_WEIGHT_UNIT, TWO_TO_23, store_bytes, token_scores
// gives: BLOCK_MAXIMA, weigh, store_weights

// import block_max = attend/block_max.wgsl#atomic
// import value_ranges = attend/value_ranges.wgsl#folded

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
