// Weighted sum of packed values with integer dot products.
//
// Weights become integers of 15 bits relative to the step's largest weight, in two signed byte planes. The invocation
// that scored the four tokens of a field group packs them four to a word. Rounding is dithered by a fixed pattern over
// the tokens of a step. Rounding to nearest would drop every weight below half a unit at once when one token of the
// step outweighs the others by more than 2^16.
//
// needs: HEADS, HEAD_DIM, LANE_TOKENS, STEP_TILES, TILE_TOKENS, enter, keep, tile_bases
// gives: weight_bytes, begin_values, store_weights, add_values

// import attend/value_dots.wgsl
// import attend/weights_of_step.wgsl

const LARGEST_WEIGHT: f32 = 32639f;
// Factor of a sum of integer weights times bytes.
const WEIGHT_UNIT: f32 = 1f / (32639f * VALUE_BYTE);
const GOLDEN_RATIO: f32 = 0.618034f;

// [head][byte plane][tile of the step][vector][quad], four field groups each: the order of use.
var<workgroup> weight_bytes: array<vec4<u32>, HEADS * 2u * STEP_TILES * 8u>;
// Added to the weights of the invocation's tokens before they are truncated to integers: 0 … 1, spread evenly over the
// tokens of a step.
var<private> dither: array<f32, LANE_TOKENS>;

// import value_ranges = attend/value_ranges/folded.wgsl

fn begin_values(invocation: u32) {
    // unroll
    for (var i = 0u; i < LANE_TOKENS; i++) {
        dither[i] = fract(f32(invocation / 32u * TILE_TOKENS + i * 32u + invocation % 32u) * GOLDEN_RATIO);
    }
    // unroll
    for (var i = 0u; i < HEADS * CHANNELS; i++) {
        sums[i] = 0f;
    }
    begin_value_ranges(invocation);
}

fn store_weights(team: u32, lane: u32, parity: u32) {
    take_value_ranges(parity);
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        var integers: vec4<u32>;
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            integers[i] = u32(ranged_weight(weights[head * LANE_TOKENS + i], i) * LARGEST_WEIGHT + dither[i]);
        }
        // Two integers of up to 16 bits per word, so that two bytes are extracted at once.
        let even = integers.x | (integers.z << 16u);
        let odd = integers.y | (integers.w << 16u);
        let low = (even & 0x00ff00ffu) | ((odd & 0x00ff00ffu) << 8u);
        // The low byte counts as signed, so it borrows from the high one where its top bit is set.
        let high = (((even + 0x00800080u) >> 8u) & 0x00ff00ffu) | ((odd + 0x00800080u) & 0xff00ff00u);
        let place = value_place(lane);
        let at = (head * 2u * STEP_TILES + team) * 8u + place.x;
        weight_bytes[at][place.y] = low;
        weight_bytes[at + STEP_TILES * 8u][place.y] = high;
    }
}

fn add_values(first: u32, tiles: u32, team: u32, lane: u32) {
    // [byte plane][head][channel]
    var step_sums: array<i32, 2u * HEADS * CHANNELS>;
    // unroll
    for (var i = 0u; i < 2u * HEADS * CHANNELS; i++) {
        step_sums[i] = 0i;
    }
    let first_tile = team / CHANNEL_BLOCKS * CHANNEL_BLOCKS;
    let end_tile = min(first_tile + CHANNEL_BLOCKS, tiles - first);
    for (var tile = first_tile; tile < end_tile; tile++) {
        let base = tile_bases[first + tile] * (VALUE_VECTORS * HEAD_DIM);
        for (var vector = 0u; vector < VALUE_VECTORS; vector++) {
            var words: array<ValueVector, CHANNELS>;
            // unroll
            for (var k = 0u; k < CHANNELS; k++) {
                words[k] = values[base + vector * HEAD_DIM + min(own_channel(team, lane, k), HEAD_DIM - 1u)];
            }
            for (var quad = 0u; quad < VALUE_QUADS; quad++) {
                var codes: array<u32, 4u * CHANNELS>;
                // unroll
                for (var f = 0u; f < 4u; f++) {
                    // unroll
                    for (var k = 0u; k < CHANNELS; k++) {
                        codes[f * CHANNELS + k] = value_bytes(words[k], quad, f);
                    }
                }
                // unroll
                for (var head = 0u; head < HEADS; head++) {
                    // unroll
                    for (var plane = 0u; plane < 2u; plane++) {
                        let w = weight_bytes[((head * 2u + plane) * STEP_TILES + tile) * 8u + vector * VALUE_QUADS + quad];
                        // unroll
                        for (var k = 0u; k < CHANNELS; k++) {
                            let at = (plane * HEADS + head) * CHANNELS + k;
                            // One addition of three operands for two products.
                            step_sums[at] = step_sums[at] + dot4I8Packed(codes[k], w.x) + dot4I8Packed(codes[CHANNELS + k], w.y);
                            step_sums[at] = step_sums[at] + dot4I8Packed(codes[2u * CHANNELS + k], w.z) + dot4I8Packed(codes[3u * CHANNELS + k], w.w);
                        }
                    }
                }
            }
        }
    }
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        // unroll
        for (var k = 0u; k < CHANNELS; k++) {
            let at = head * CHANNELS + k;
            // At most 512 tokens · 32639 · 128 in magnitude: it fits 32 bits.
            let sum = step_sums[HEADS * CHANNELS + at] * 256i + step_sums[at];
            sums[at] = sums[at] * keep[head] + f32(sum) * (enter[head] * WEIGHT_UNIT * largest_value_scale());
        }
    }
}
