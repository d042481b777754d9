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
//   enter_value_tile, keep, leave_value_tile, tile_bases
// gives: TILE_QUAD_PAIRS, BLOCK_STRIDE, TWO_TO_23, LARGEST_WEIGHT_UNIT, WEIGHT_GROUPS, GROUP_CHANNELS, weight_bytes,
//   is_first_of_block, begin_values, store_bytes, add_values
// set by plans: WEIGHT_GROUPS, LEAST_WEIGHT_VECTORS

// import attend/value_dots.wgsl

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
// Number of vectors that another use of this memory needs (attend/query_bytes/of_weights.wgsl).
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

// import byte_weights = attend/byte_weights/shared.wgsl

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
            sums[head * CHANNELS + k] *= keep[head];
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
