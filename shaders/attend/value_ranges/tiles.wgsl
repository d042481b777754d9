// Values with one range per channel and tile: v = s c + m. Scales are applied to the sums of a block of tokens when
// these are added to the running sums, minima to the sum of the tile's weights. The weights are integers of one byte,
// which lanes sum for every block.
//
// needs: CHANNELS, HEADS, HEAD_DIM, INVOCATIONS, STEP_TILES, TILE_QUAD_PAIRS, TWO_TO_23, VALUE_BYTE, is_first_of_block,
//   own_channel, sums, value_place
// gives: begin_value_ranges, enter_weights, enter_value_tile, channel_scale, enter_block, leave_value_tile,
//   ranged_output
// binds: 6 value_ranges

// Scale and minimum in f16: [tile][channel].
@group(0) @binding(6) var<storage, read> value_ranges: array<u32>;

// Sums of the weights of a block, as the bits of 2^23 plus the sum: [set][tile of the step][quad pair][head]. There are
// two sets, so that one can be reset while the other is in use.
const BLOCK_SET: u32 = STEP_TILES * TILE_QUAD_PAIRS * HEADS;
var<workgroup> block_weights: array<atomic<u32>, 2u * BLOCK_SET>;

// Scale and minimum of the lane's channels.
var<private> tile_ranges: array<vec2<f32>, CHANNELS>;
// Of the tile: [head].
var<private> tile_weights: array<f32, HEADS>;
// Set of the step.
var<private> weights_parity: u32;

fn begin_value_ranges(invocation: u32) {
    for (var i = invocation; i < 2u * BLOCK_SET; i += INVOCATIONS) {
        atomicStore(&block_weights[i], TWO_TO_23);
    }
}

fn enter_weights(head: u32, weights: u32, parity: u32, team: u32, lane: u32) {
    let block = (team * TILE_QUAD_PAIRS + value_place(lane).x / 2u) * HEADS + head;
    atomicAdd(&block_weights[parity * BLOCK_SET + block], weights);
    if (is_first_of_block(lane)) {
        atomicStore(&block_weights[(1u - parity) * BLOCK_SET + block], TWO_TO_23);
    }
    weights_parity = parity;
}

fn enter_value_tile(tile_base: u32, team: u32, lane: u32) {
    // unroll
    for (var k = 0u; k < CHANNELS; k++) {
        tile_ranges[k] = unpack2x16float(value_ranges[tile_base * HEAD_DIM + min(own_channel(team, lane, k), HEAD_DIM - 1u)]);
        // The factor of the weights compensates for this.
        tile_ranges[k].y *= VALUE_BYTE;
    }
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        tile_weights[head] = 0f;
    }
}

fn channel_scale(k: u32) -> f32 {
    return tile_ranges[k].x;
}

fn enter_block(tile: u32, pair: u32, head: u32, scale: f32) {
    let weights = atomicLoad(&block_weights[weights_parity * BLOCK_SET + (tile * TILE_QUAD_PAIRS + pair) * HEADS + head]);
    tile_weights[head] += (bitcast<f32>(weights) - 8388608f) * scale;
}

fn leave_value_tile() {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        // unroll
        for (var k = 0u; k < CHANNELS; k++) {
            sums[head * CHANNELS + k] += tile_weights[head] * tile_ranges[k].y;
        }
    }
}

fn ranged_output(mean: f32, head: u32, total: f32, channel: u32) -> f32 {
    return mean;
}
