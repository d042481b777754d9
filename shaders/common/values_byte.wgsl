// Weighted sum of packed values by integer dot products, with weights of one byte.
//
// A weight is an integer 0 … 255 relative to the largest weight of its *block*: 32 tokens, the four tokens each of the
// eight lanes whose field groups are two quads that are used one after the other. The sum of a block is folded into
// f32 with the block's scale, exp2(block's maximum - running maximum); so one large score coarsens the weights of 31
// other tokens and of no more. The sum of weights is that of the integers: the mean of the values is exact, and only
// what the weights say beyond it has their error.
//
// Bytes are made unsigned for the unsigned dot product: 128 more than they were. A block's sum is at most
// 32 · 255 · 255 < 2^23, so that it starts at the bits of 2^23 and is that float plus the sum.

// import common/value_dots.wgsl

// Quad pairs of a tile.
const TILE_QUAD_PAIRS: u32 = 4u;
// Lanes l, l ^ 1, l ^ BLOCK_STRIDE, l ^ 2 BLOCK_STRIDE and what these make together are a block: VALUE_QUADS, but at
// least 2.
const BLOCK_STRIDE: u32 = (VALUE_QUADS + 1u) / 2u * 2u;
// The fewest vectors that hold whole pairs, and their pairs.
const PAIR_VECTORS: u32 = (VALUE_QUADS + 1u) / VALUE_QUADS;
const VECTOR_PAIRS: u32 = (VALUE_QUADS + 1u) / 2u;

const TWO_TO_23: u32 = 1258291200u;
const LARGEST_WEIGHT_UNIT: f32 = 1f / 255f;
// What a sum of integer weights times bytes must be multiplied with.
const WEIGHT_UNIT: f32 = 1f / VALUE_BYTE;

// [head][tile of the step][quad], four field groups each: the order of use.
var<workgroup> weight_bytes: array<vec4<u32>, HEADS * STEP_TILES * 8u>;
// [tile of the step][quad pair][head]
var<workgroup> block_scales: array<f32, STEP_TILES * TILE_QUAD_PAIRS * HEADS>;

// The four weights of the invocation, and the scale of its block: [head].
var<private> own_bytes: array<u32, HEADS>;
var<private> own_scales: array<f32, HEADS>;

fn is_first_of_block(lane: u32) -> bool {
    return (lane & (3u * BLOCK_STRIDE + 1u)) == 0u;
}

// import block_max = common/block_max_atomic.wgsl
// import value_ranges = common/value_ranges_folded.wgsl

fn begin_values(invocation: u32) {
    begin_block_maxima(invocation);
    // unroll
    for (var i = 0u; i < HEADS * CHANNELS; i++) {
        sums[i] = 0f;
    }
    begin_value_ranges(invocation);
}

// Sets the weights of a head's tokens and returns their sum, relative to the new running maximum.
fn weigh(head: u32, step_max: f32, new_max: f32, parity: u32, team: u32, lane: u32) -> f32 {
    let largest = block_max(head, parity, team, lane);
    // Rounded to nearest in the low bits of 2^23 + weight; the bits of 2^23 fall off the top but for one byte.
    var bytes = 0u;
    // unroll
    for (var i = 0u; i < LANE_TOKENS; i++) {
        let rounded = exp2(token_scores[head * LANE_TOKENS + i] - largest) * 255f + 8388608f;
        bytes += bitcast<u32>(rounded) << (8u * i);
    }
    bytes -= TWO_TO_23;
    own_bytes[head] = bytes;
    // Sums of weights are 1 where a weight is 255, as those of other segments are: they are merged.
    own_scales[head] = exp2(largest - new_max) * LARGEST_WEIGHT_UNIT;
    return (bitcast<f32>(dot4U8Packed(bytes, 0x01010101u) + TWO_TO_23) - 8388608f) * own_scales[head];
}

fn store_weights(team: u32, lane: u32, parity: u32) {
    let place = value_place(lane);
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        weight_bytes[(head * STEP_TILES + team) * 8u + place.x][place.y] = own_bytes[head];
        if (is_first_of_block(lane)) {
            block_scales[(team * TILE_QUAD_PAIRS + place.x / 2u) * HEADS + head] = own_scales[head] * WEIGHT_UNIT;
        }
    }
}

fn add_values(first: u32, tiles: u32, team: u32, lane: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        // unroll
        for (var k = 0u; k < CHANNELS; k++) {
            sums[head * CHANNELS + k] *= keep[head];
        }
    }
    let first_tile = team / CHANNEL_BLOCKS * CHANNEL_BLOCKS;
    let end_tile = min(first_tile + CHANNEL_BLOCKS, tiles - first);
    for (var tile = first_tile; tile < end_tile; tile++) {
        let base = tile_bases[first + tile] * (VALUE_VECTORS * HEAD_DIM);
        for (var first_vector = 0u; first_vector < VALUE_VECTORS; first_vector += PAIR_VECTORS) {
            var words: array<ValueVector, PAIR_VECTORS * CHANNELS>;
            // unroll
            for (var v = 0u; v < PAIR_VECTORS; v++) {
                // unroll
                for (var k = 0u; k < CHANNELS; k++) {
                    words[v * CHANNELS + k] = values[base + (first_vector + v) * HEAD_DIM + min(own_channel(team, lane, k), HEAD_DIM - 1u)];
                }
            }
            for (var in_vectors = 0u; in_vectors < VECTOR_PAIRS; in_vectors++) {
                let pair = first_vector / PAIR_VECTORS * VECTOR_PAIRS + in_vectors;
                var pair_sums: array<u32, HEADS * CHANNELS>;
                // unroll
                for (var i = 0u; i < HEADS * CHANNELS; i++) {
                    pair_sums[i] = TWO_TO_23;
                }
                // unroll
                for (var q = 0u; q < 2u; q++) {
                    var codes: array<u32, 4u * CHANNELS>;
                    // unroll
                    for (var f = 0u; f < 4u; f++) {
                        // unroll
                        for (var k = 0u; k < CHANNELS; k++) {
                            codes[f * CHANNELS + k] = value_bytes(words[q * (PAIR_VECTORS - 1u) * CHANNELS + k], (in_vectors * 2u + q) % VALUE_QUADS, f) ^ 0x80808080u;
                        }
                    }
                    // unroll
                    for (var head = 0u; head < HEADS; head++) {
                        let w = weight_bytes[(head * STEP_TILES + tile) * 8u + pair * 2u + q];
                        // unroll
                        for (var k = 0u; k < CHANNELS; k++) {
                            let at = head * CHANNELS + k;
                            // One addition of three operands for two products.
                            pair_sums[at] = pair_sums[at] + dot4U8Packed(codes[k], w.x) + dot4U8Packed(codes[CHANNELS + k], w.y);
                            pair_sums[at] = pair_sums[at] + dot4U8Packed(codes[2u * CHANNELS + k], w.z) + dot4U8Packed(codes[3u * CHANNELS + k], w.w);
                        }
                    }
                }
                // unroll
                for (var head = 0u; head < HEADS; head++) {
                    let scale = block_scales[(tile * TILE_QUAD_PAIRS + pair) * HEADS + head];
                    // unroll
                    for (var k = 0u; k < CHANNELS; k++) {
                        sums[head * CHANNELS + k] += (bitcast<f32>(pair_sums[head * CHANNELS + k]) - 8388608f) * scale;
                    }
                }
            }
        }
    }
}
