// Slot `values`: the weights of the tokens of a step and the weighted sums of values, in the order in which
// attend/softmax_loop.wgsl calls them.
//
// Every choice has
//   fn value_pages() -> u32
//     pages of the values that are bound
//   fn begin_values(invocation: u32)
//     once, before the first step
//   fn weigh(head: u32, step_max: f32, new_max: f32, parity: u32, team: u32, lane: u32) -> f32
//     makes the weights of the lane's tokens and returns their sum, relative to the new running maximum
//   fn store_weights(team: u32, lane: u32, parity: u32)
//     puts them where all invocations find them; a barrier follows
//   fn add_values(first: u32, tiles: u32, team: u32, lane: u32)
//     adds the values of the step, the first tile of which is `first`, to the running sums
//   fn write_states(item: WorkItem, y: u32, team: u32, lane: u32, invocation: u32)
//     writes the states of the item
//
// needs: token_scores
// gives: read_output_ranges, load_value_ranges, skip_value_ranges, skip_value_range, own_reference, enter_block_max,
//   enter_value_ranges

// Called with the first reads of an item. Reads the ranges that its outputs are scaled with.
fn read_output_ranges(range_slot: u32, kv_head: u32, invocation: u32) {}

// Called by the team of a tile. Reads the ranges of the lane's tokens. The other two are for tokens that do not exist:
// all of them, or token `i`.
fn load_value_ranges(tile_base: u32, lane: u32) {}

fn skip_value_ranges() {}

fn skip_value_range(i: u32) {}

// The largest score of the lane's tokens for a head, or what else their weights are relative to.
fn own_reference(head: u32) -> f32 {
    return max(max(token_scores[head * 4u], token_scores[head * 4u + 1u]), max(token_scores[head * 4u + 2u], token_scores[head * 4u + 3u]));
}

// Called before the first barrier of a step. Records the values that other lanes need: the reference of maximum
// `at`, and the ranges.
fn enter_block_max(at: u32, own: f32, parity: u32, team: u32, lane: u32) {}

fn enter_value_ranges(parity: u32, team: u32, lane: u32) {}

// -------- byte --------

// Weighted sum of packed values with integer dot products, with weights of one byte.
//
// A weight is an integer 0 … 255 relative to the largest weight of its *block*: 32 tokens, four in each of the eight
// lanes whose field groups form two quads that are used one after the other. The sum of a block is folded into f32 with
// the block's scale, exp2(block's maximum - running maximum). A large score therefore coarsens the weights of only the
// 31 other tokens. If channels share their weights, the sum of weights is that of the integers: the mean of the values
// is exact, and only deviations from it carry the error of the weights.
//
// Bytes are made unsigned for the unsigned dot product by adding 128. A block's sum is at most 32 · 255 · 255 < 2^23.
// It therefore starts at the bits of 2^23 and equals that float plus the sum.
//
// needs: HEADS, HEAD_DIM, STEP_TILES, begin_block_maxima, begin_value_ranges, channel_scale, enter_block,
//   enter_value_tile, leave_value_tile, rescale_acc, tile_bases
// gives: TILE_QUAD_PAIRS, BLOCK_STRIDE, TWO_TO_23, LARGEST_WEIGHT_UNIT, WEIGHT_GROUPS, GROUP_CHANNELS, weight_bytes,
//   is_first_of_block, begin_values, store_bytes, add_values
// set by plans: WEIGHT_GROUPS, LEAST_WEIGHT_VECTORS

// import attend/products.wgsl#value_dots
// import byte_weights = attend/byte_weights.wgsl#shared

// Quad pairs of a tile.
const TILE_QUAD_PAIRS: u32 = 4u;
// Lanes l, l ^ 1, l ^ BLOCK_STRIDE, l ^ 2 BLOCK_STRIDE and their combinations are a block. VALUE_QUADS, but at least 2.
const BLOCK_STRIDE: u32 = (VALUE_QUADS + 1u) / 2u * 2u;
// The fewest vectors that hold whole pairs, and their pairs.
const PAIR_VECTORS: u32 = (VALUE_QUADS + 1u) / VALUE_QUADS;
const VECTOR_PAIRS: u32 = (VALUE_QUADS + 1u) / 2u;

const TWO_TO_23: u32 = 1258291200u;
const LARGEST_WEIGHT_UNIT: f32 = 1f / 255f;
// Factor of a sum of integer weights times bytes.
const WEIGHT_UNIT: f32 = 1f / VALUE_BYTE;

// Groups of channels with weights of their own, and channels of a group.
const WEIGHT_GROUPS: u32 = 1u;
const GROUP_CHANNELS: u32 = HEAD_DIM / WEIGHT_GROUPS;

// [group of channels][head][tile of the step][quad], four field groups each, in the order of use. Groups lie in banks
// of their own.
const GROUP_BYTES: u32 = HEADS * STEP_TILES * 8u + WEIGHT_GROUPS / 2u;
// Number of vectors that another use of this memory needs (attend/query_bytes.wgsl#of_weights).
const LEAST_WEIGHT_VECTORS: u32 = 0u;
const WEIGHT_VECTORS: u32 = max(WEIGHT_GROUPS * GROUP_BYTES, LEAST_WEIGHT_VECTORS);
var<workgroup> weight_bytes: array<vec4<u32>, WEIGHT_VECTORS>;
// [group of channels][tile of the step][quad pair][head]
const GROUP_SCALES: u32 = STEP_TILES * TILE_QUAD_PAIRS * HEADS;
var<workgroup> block_scales: array<f32, WEIGHT_GROUPS * GROUP_SCALES>;

// The group of the lane's channels.
fn weight_group(team: u32, lane: u32) -> u32 {
    return select(0u, own_channel(team, lane, 0u) / GROUP_CHANNELS, WEIGHT_GROUPS > 1u);
}

fn is_first_of_block(lane: u32) -> bool {
    return (lane & (3u * BLOCK_STRIDE + 1u)) == 0u;
}

fn begin_values(invocation: u32) {
    begin_block_maxima(invocation);
    // unroll
    for (var i = 0u; i < HEADS * CHANNELS; i++) {
        sums[i] = 0f;
    }
    begin_value_ranges(invocation);
}

// Stores the four weights of the invocation and, once per block, the value of a weight of 1.
fn store_bytes(group: u32, head: u32, team: u32, lane: u32, bytes: u32, scale: f32) {
    let place = value_place(lane);
    weight_bytes[group * GROUP_BYTES + (head * STEP_TILES + team) * 8u + place.x][place.y] = bytes;
    if (is_first_of_block(lane)) {
        block_scales[group * GROUP_SCALES + (team * TILE_QUAD_PAIRS + place.x / 2u) * HEADS + head] = scale * WEIGHT_UNIT;
    }
}

fn add_values(first: u32, tiles: u32, team: u32, lane: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        // unroll
        for (var k = 0u; k < CHANNELS; k++) {
            sums[head * CHANNELS + k] *= rescale_acc[head];
        }
    }
    let group = weight_group(team, lane);
    let first_tile = team / CHANNEL_BLOCKS * CHANNEL_BLOCKS;
    let end_tile = min(first_tile + CHANNEL_BLOCKS, tiles - first);
    for (var tile = first_tile; tile < end_tile; tile++) {
        let base = tile_bases[first + tile] * (VALUE_VECTORS * HEAD_DIM);
        enter_value_tile(tile_bases[first + tile], team, lane);
        for (var first_vector = 0u; first_vector < VALUE_VECTORS; first_vector += PAIR_VECTORS) {
            var words: array<ValueVector, PAIR_VECTORS * CHANNELS>;
            // unroll
            for (var v = 0u; v < PAIR_VECTORS; v++) {
                // unroll
                for (var k = 0u; k < CHANNELS; k++) {
                    words[v * CHANNELS + k] = unsigned_words(values[base + (first_vector + v) * HEAD_DIM + min(own_channel(team, lane, k), HEAD_DIM - 1u)]);
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
                            codes[f * CHANNELS + k] = unsigned_bytes(words[q * (PAIR_VECTORS - 1u) * CHANNELS + k], (in_vectors * 2u + q) % VALUE_QUADS, f);
                        }
                    }
                    // unroll
                    for (var head = 0u; head < HEADS; head++) {
                        let w = weight_bytes[group * GROUP_BYTES + (head * STEP_TILES + tile) * 8u + pair * 2u + q];
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
                    let scale = block_scales[group * GROUP_SCALES + (tile * TILE_QUAD_PAIRS + pair) * HEADS + head];
                    enter_block(tile, pair, head, scale);
                    // unroll
                    for (var k = 0u; k < CHANNELS; k++) {
                        sums[head * CHANNELS + k] += (bitcast<f32>(pair_sums[head * CHANNELS + k]) - 8388608f) * (scale * channel_scale(k));
                    }
                }
            }
        }
        leave_value_tile();
    }
}

// -------- dot --------

// Weighted sum of packed values with integer dot products.
//
// Weights become integers of 15 bits relative to the step's largest weight, in two signed byte planes. The invocation
// that scored the four tokens of a field group packs them four to a word. Rounding is dithered by a fixed pattern over
// the tokens of a step. Rounding to nearest would drop every weight below half a unit at once when one token of the
// step outweighs the others by more than 2^16.
//
// needs: HEADS, HEAD_DIM, LANE_TOKENS, STEP_TILES, TILE_TOKENS, rescale_acc, rescale_step, tile_bases
// gives: weight_bytes, begin_values, store_weights, add_values

// import attend/products.wgsl#value_dots
// import attend/products.wgsl#weights_of_step
// import value_ranges = attend/value_ranges.wgsl#folded

const LARGEST_WEIGHT: f32 = 32639f;
// Factor of a sum of integer weights times bytes.
const WEIGHT_UNIT: f32 = 1f / (32639f * VALUE_BYTE);
const GOLDEN_RATIO: f32 = 0.618034f;

// [head][byte plane][tile of the step][vector][quad], four field groups each: the order of use.
var<workgroup> weight_bytes: array<vec4<u32>, HEADS * 2u * STEP_TILES * 8u>;
// Added to the weights of the invocation's tokens before they are truncated to integers: 0 … 1, spread evenly over the
// tokens of a step.
var<private> dither: array<f32, LANE_TOKENS>;

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
    take_value_ranges();
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
            let unit = rescale_step[head] * WEIGHT_UNIT;
            sums[at] = sums[at] * rescale_acc[head] + f32(sum) * unit;
        }
    }
}

// -------- fma --------

// Weighted sum of values with f32 multiply-adds, for f16 values and for ranges that change inside a tile.
//
// Weights lie in workgroup memory, one vector of four tokens per field group, written by the invocation that scored
// them. Team t works on CHANNELS channels per lane, 32 apart, of channel block t % CHANNEL_BLOCKS, and on
// CHANNEL_BLOCKS of the step's four tiles. Neighbouring lanes read neighbouring vectors.
//
// needs: HEADS, HEAD_DIM, INVOCATIONS, KV_HEADS, STEP_TILES, TILE_TOKENS, WorkItem, finish_output, put_output,
//   rescale_acc, rescale_step, sum_parts, tile_bases, write_lse
// gives: ValueVector, CHANNELS, sums, value_pages, begin_values, store_weights, own_channel, add_values, write_states
// binds: 5 values
// set by plans: ValueVector, Weights, CHANNELS, CHANNEL_BLOCKS

// import value_field = attend/value_field.wgsl#f16
// import attend/products.wgsl#weights_of_step
// import attend/products.wgsl#add_product

alias ValueVector = vec4<u32>;
alias Weights = vec4<f32>;

@group(0) @binding(5) var<storage, read> values: array<ValueVector>;

// Channels of a lane, and blocks of 32 * CHANNELS channels that the teams are spread over: 1, 2 or 4.
const CHANNELS: u32 = 2u;
const CHANNEL_BLOCKS: u32 = 2u;
const TILE_BLOCKS: u32 = STEP_TILES / CHANNEL_BLOCKS;

// What the largest weight becomes. Halves lose bits below 2^-14, and are 0 below 2^-25. So small weights make the whole
// output beside a sink without a value.
const LARGEST_WEIGHT: f32 = 16384f;

// [head][tile of the step][field group]
var<workgroup> step_weights: array<Weights, HEADS * TILE_TOKENS>;
var<workgroup> block_sums: array<f32, TILE_BLOCKS * 32u * CHANNELS * CHANNEL_BLOCKS>;

// [head][channel]
var<private> sums: array<f32, HEADS * CHANNELS>;

fn value_pages() -> u32 {
    return arrayLength(&values) / (VALUE_VECTORS * HEAD_DIM * KV_HEADS);
}

fn begin_values(invocation: u32) {
    // unroll
    for (var i = 0u; i < HEADS * CHANNELS; i++) {
        sums[i] = 0f;
    }
}

fn store_weights(team: u32, lane: u32, parity: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        let w = vec4<f32>(weights[head * 4u], weights[head * 4u + 1u], weights[head * 4u + 2u], weights[head * 4u + 3u]);
        step_weights[(head * STEP_TILES + team) * 32u + lane] = Weights(w * (rescale_step[head] * LARGEST_WEIGHT));
    }
}

fn own_channel(team: u32, lane: u32, k: u32) -> u32 {
    return (team % CHANNEL_BLOCKS * CHANNELS + k) * 32u + lane;
}

fn add_values(first: u32, tiles: u32, team: u32, lane: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        // unroll
        for (var k = 0u; k < CHANNELS; k++) {
            sums[head * CHANNELS + k] *= rescale_acc[head];
        }
    }
    let first_tile = team / CHANNEL_BLOCKS * CHANNEL_BLOCKS;
    let end_tile = min(first_tile + CHANNEL_BLOCKS, tiles - first);
    for (var tile = first_tile; tile < end_tile; tile++) {
        let tile_base = tile_bases[first + tile];
        let base = tile_base * (VALUE_VECTORS * HEAD_DIM);
        // unroll
        for (var k = 0u; k < CHANNELS; k++) {
            begin_value_tile(tile_base, min(own_channel(team, lane, k), HEAD_DIM - 1u), k);
        }
        for (var vector = 0u; vector < VALUE_VECTORS; vector++) {
            var words: array<ValueVector, CHANNELS>;
            // unroll
            for (var k = 0u; k < CHANNELS; k++) {
                words[k] = values[base + vector * HEAD_DIM + min(own_channel(team, lane, k), HEAD_DIM - 1u)];
            }
            for (var plane = 0u; plane < VALUE_PLANES; plane++) {
                // unroll
                for (var w = 0u; w < VALUE_WORD_FIELDS; w++) {
                    let field = (vector * VALUE_WORD_FIELDS + w) * VALUE_PLANES + plane;
                    var v: array<vec4<f32>, CHANNELS>;
                    // unroll
                    for (var k = 0u; k < CHANNELS; k++) {
                        v[k] = value_field(words[k], w, plane, field, k);
                    }
                    // unroll
                    for (var head = 0u; head < HEADS; head++) {
                        let p = vec4<f32>(step_weights[(head * STEP_TILES + tile) * 32u + field]);
                        // unroll
                        for (var k = 0u; k < CHANNELS; k++) {
                            sums[head * CHANNELS + k] = add_product(p, v[k], sums[head * CHANNELS + k]);
                        }
                    }
                }
            }
        }
    }
}

fn write_states(item: WorkItem, y: u32, team: u32, lane: u32, invocation: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        let total = sum_parts[head * INVOCATIONS];
        // unroll
        for (var k = 0u; k < CHANNELS; k++) {
            block_sums[team / CHANNEL_BLOCKS * (32u * CHANNELS * CHANNEL_BLOCKS) + own_channel(team, lane, k)] =
                sums[head * CHANNELS + k];
        }
        workgroupBarrier();
        for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
            var sum = 0f;
            // unroll
            for (var block = 0u; block < TILE_BLOCKS; block++) {
                sum += block_sums[block * (32u * CHANNELS * CHANNEL_BLOCKS) + channel];
            }
            put_output(item, y, head, channel, sum / (total * LARGEST_WEIGHT));
        }
        finish_output(item, y, head, invocation);
        write_lse(item, y, head, total, invocation);
        workgroupBarrier();
    }
}
