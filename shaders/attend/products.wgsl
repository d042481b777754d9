// Products of a step that several choices sum.

// -------- add_product --------

// sum + a · b in four fused multiply-adds. `sum + dot(a, b)` would take one multiplication, three of them and an
// addition.
//
// gives: add_product
fn add_product(a: vec4<f32>, b: vec4<f32>, sum: f32) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}

// -------- value_dots --------

// The common part of the two weighted sums of packed values with integer dot products: the assignment of channels, and
// the end.
//
// Team t works on CHANNELS channels per lane, CHANNEL_STRIDE apart, of channel block t % CHANNEL_BLOCKS, and on
// CHANNEL_BLOCKS of the step's four tiles. Neighbouring lanes read neighbouring 16-byte vectors; weights are read as
// 16-byte broadcasts.
//
// needs: HEADS, HEAD_DIM, INVOCATIONS, KV_HEADS, STEP_TILES, WorkItem, finish_output, finish_value_ranges, put_output,
//   ranged_output, sum_parts, write_lse
// gives: values, CHANNELS, CHANNEL_BLOCKS, sums, value_pages, own_channel, write_states
// binds: 5 values
// set by plans: CHANNELS, CHANNEL_BLOCKS, CHANNEL_STRIDE

// import value_bytes = attend/value_bytes.wgsl#top

@group(0) @binding(5) var<storage, read> values: array<ValueVector>;

// Channels of a lane, and blocks of 32 * CHANNELS channels that the teams are spread over: 1, 2 or 4.
const CHANNELS: u32 = 2u;
const CHANNEL_BLOCKS: u32 = 2u;
const TILE_BLOCKS: u32 = STEP_TILES / CHANNEL_BLOCKS;

// 32, or 32 / CHANNELS where the channels of a lane must be of one group (attend/values.wgsl#byte).
const CHANNEL_STRIDE: u32 = 32u;

var<workgroup> block_sums: array<f32, TILE_BLOCKS * 32u * CHANNELS * CHANNEL_BLOCKS>;

// [head][channel]
var<private> sums: array<f32, HEADS * CHANNELS>;

fn value_pages() -> u32 {
    return arrayLength(&values) / (VALUE_VECTORS * HEAD_DIM * KV_HEADS);
}

fn own_channel(team: u32, lane: u32, k: u32) -> u32 {
    let first = team % CHANNEL_BLOCKS * CHANNELS * 32u + lane / CHANNEL_STRIDE * (CHANNEL_STRIDE * CHANNELS);
    return first + k * CHANNEL_STRIDE + lane % CHANNEL_STRIDE;
}

fn write_states(item: WorkItem, y: u32, team: u32, lane: u32, invocation: u32) {
    var total: array<f32, HEADS>;
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        total[head] = sum_parts[head * INVOCATIONS];
    }
    finish_value_ranges(invocation);
    // unroll
    for (var head = 0u; head < HEADS; head++) {
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
            let output = ranged_output(sum / total[head], head, total[head], channel);
            put_output(item, y, head, channel, output);
        }
        finish_output(item, y, head, invocation);
        write_lse(item, y, head, total[head], invocation);
        workgroupBarrier();
    }
}

// -------- weights_of_step --------

// Weights relative to the step's maximum, and their exact sum.
//
// needs: HEADS, LANE_TOKENS, rescale_step, token_scores
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
    return sum * rescale_step[head];
}
