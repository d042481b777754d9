// Slot `value_ranges`: ranges of packed values that are summed with integer dot products. It decides which part is
// multiplied into the weights, and which into the outputs. A choice may also define the range functions of
// values.wgsl.
//
// Every choice has
//   fn ranged_output(mean: f32, head: u32, total: f32, channel: u32) -> f32
//     the output of a channel, of the mean that the integers give and the sum of weights
//
// Where scales are multiplied into the weights, the reference of a step's weights is the largest score + log2(scale),
// not the largest score. So the largest weight times scale is 1, whatever token has the largest score, and whatever
// token has the largest scale.
//
// needs: LANE_TOKENS, token_scores
// gives: log_of_scales, scaled_reference, begin_value_ranges, take_value_ranges, ranged_weight, enter_weights,
//   enter_value_tile, leave_value_tile, enter_block, channel_scale, finish_value_ranges

// log2 of scales. 0 counts as 2^-25, which is below every other scale in f16. So weights are at most 2^25.
fn log_of_scales(scales: vec4<f32>) -> vec4<f32> {
    return log2(max(scales, vec4<f32>(2.9802322e-8f)));
}

// The largest score + log2(scale) of the lane's tokens for a head.
fn scaled_reference(head: u32, log_scales: vec4<f32>) -> f32 {
    let at = head * LANE_TOKENS;
    let low = max(token_scores[at] + log_scales.x, token_scores[at + 1u] + log_scales.y);
    return max(low, max(token_scores[at + 2u] + log_scales.z, token_scores[at + 3u] + log_scales.w));
}

// Called before the first step.
fn begin_value_ranges(invocation: u32) {}

// Called once the weights of a step are known, before they become integers.
fn take_value_ranges() {}

// The weight of token `i` of the lane, times its scale where the scale is multiplied into it: 0 … 1.
fn ranged_weight(weight: f32, i: u32) -> f32 {
    return weight;
}

// Called once the weights of a step are computed, with the sum of the lane's one-byte weights for a head.
fn enter_weights(head: u32, weights: u32, parity: u32, team: u32, lane: u32) {}

// Called before and after a tile is added to the sums.
fn enter_value_tile(tile_base: u32, team: u32, lane: u32) {}

fn leave_value_tile() {}

// Called when block `pair` of tile `tile` of the step is added, with the factor of its integers.
fn enter_block(tile: u32, pair: u32, head: u32, scale: f32) {}

// The factor of the sums of channel `k` of the lane when they are added.
fn channel_scale(k: u32) -> f32 {
    return 1f;
}

// Called once before the outputs are written, by all invocations.
fn finish_value_ranges(invocation: u32) {}

// -------- folded --------

// Per-channel ranges of the span: v = s u + m with u = c + 2^(bits-1), applied once to every output.
//
// needs: HEAD_DIM, INVOCATIONS, KV_HEADS
// gives: read_output_ranges, begin_value_ranges, ranged_output
// binds: 6 value_span_ranges
// set by plans: VALUE_MIDDLE

// Scale and minimum: [range slot][KV head][channel].
@group(0) @binding(6) var<storage, read> value_span_ranges: array<vec2<f32>>;

const VALUE_MIDDLE: f32 = 8f;

// Ranges of the outputs, by channel. They are read at the start of an item, so that nothing waits for them at its end.
var<workgroup> output_ranges: array<vec2<f32>, HEAD_DIM>;

const OWN_CHANNELS: u32 = (HEAD_DIM + INVOCATIONS - 1u) / INVOCATIONS;

var<private> own_ranges: array<vec2<f32>, OWN_CHANNELS>;

fn read_output_ranges(range_slot: u32, kv_head: u32, invocation: u32) {
    let slot = min(range_slot, arrayLength(&value_span_ranges) / (KV_HEADS * HEAD_DIM) - 1u);
    // unroll
    for (var i = 0u; i < OWN_CHANNELS; i++) {
        let channel = min(i * INVOCATIONS + invocation, HEAD_DIM - 1u);
        own_ranges[i] = value_span_ranges[(slot * KV_HEADS + kv_head) * HEAD_DIM + channel];
    }
}

fn begin_value_ranges(invocation: u32) {
    // unroll
    for (var i = 0u; i < OWN_CHANNELS; i++) {
        if (i * INVOCATIONS + invocation < HEAD_DIM) {
            output_ranges[i * INVOCATIONS + invocation] = own_ranges[i];
        }
    }
}

fn ranged_output(mean: f32, head: u32, total: f32, channel: u32) -> f32 {
    let range = output_ranges[channel];
    return range.x * (mean + VALUE_MIDDLE) + range.y;
}

// -------- groups --------

// Values with one range per token and group of channels: v = s u + m with u = c + 2^(bits-1). Scales are multiplied
// into the weights before these become integers, so every group of channels has its own weights. The rest is one sum
// per head and group: see byte_weights.wgsl#groups.
//
// The reference of weights takes the largest scale of a token's groups.
//
// needs: GROUP_CHANNELS, HEADS, INVOCATIONS, LANE_TOKENS, TILE_TOKENS, WEIGHT_GROUPS, finish_sums, log_of_scales,
//   scaled_reference, sum_parts, weight_sum
// gives: common_sums, begin_common_sums, load_value_ranges, skip_value_ranges, skip_value_range, own_reference,
//   largest_scales, group_scales, group_minima, finish_value_ranges, ranged_output
// binds: 6 value_ranges

// Scale and minimum in f16: [tile][group of channels][token].
@group(0) @binding(6) var<storage, read> value_ranges: array<u32>;

// Ranges of the invocation's tokens in their stored form: [group][token].
var<private> value_range: array<u32, WEIGHT_GROUPS * LANE_TOKENS>;
// The common part of a group's outputs, relative to the running maximum: [group][head].
var<private> common_sums: array<f32, WEIGHT_GROUPS * HEADS>;

var<workgroup> common_totals: array<f32, WEIGHT_GROUPS * HEADS>;

fn begin_common_sums() {
    // unroll
    for (var i = 0u; i < WEIGHT_GROUPS * HEADS; i++) {
        common_sums[i] = 0f;
    }
}

fn load_value_ranges(tile_base: u32, lane: u32) {
    // unroll
    for (var group = 0u; group < WEIGHT_GROUPS; group++) {
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            value_range[group * LANE_TOKENS + i] = value_ranges[(tile_base * WEIGHT_GROUPS + group) * TILE_TOKENS + i * 32u + lane];
        }
    }
}

fn skip_value_ranges() {
    // unroll
    for (var i = 0u; i < LANE_TOKENS; i++) {
        skip_value_range(i);
    }
}

// Tokens that do not exist: the page may still hold data of an earlier span there.
fn skip_value_range(i: u32) {
    // unroll
    for (var group = 0u; group < WEIGHT_GROUPS; group++) {
        value_range[group * LANE_TOKENS + i] = 0u;
    }
}

fn own_reference(head: u32) -> f32 {
    return scaled_reference(head, log_of_scales(largest_scales()));
}

// The largest scale of every token's groups.
fn largest_scales() -> vec4<f32> {
    var largest = vec4<f32>(0f);
    // unroll
    for (var group = 0u; group < WEIGHT_GROUPS; group++) {
        largest = max(largest, group_scales(group));
    }
    return largest;
}

fn group_scales(group: u32) -> vec4<f32> {
    return vec4<f32>(
        unpack2x16float(value_range[group * LANE_TOKENS]).x,
        unpack2x16float(value_range[group * LANE_TOKENS + 1u]).x,
        unpack2x16float(value_range[group * LANE_TOKENS + 2u]).x,
        unpack2x16float(value_range[group * LANE_TOKENS + 3u]).x,
    );
}

fn group_minima(group: u32) -> vec4<f32> {
    return vec4<f32>(
        unpack2x16float(value_range[group * LANE_TOKENS]).y,
        unpack2x16float(value_range[group * LANE_TOKENS + 1u]).y,
        unpack2x16float(value_range[group * LANE_TOKENS + 2u]).y,
        unpack2x16float(value_range[group * LANE_TOKENS + 3u]).y,
    );
}

fn finish_value_ranges(invocation: u32) {
    // unroll
    for (var group = 0u; group < WEIGHT_GROUPS; group++) {
        workgroupBarrier();
        // unroll
        for (var head = 0u; head < HEADS; head++) {
            weight_sum[head] = common_sums[group * HEADS + head];
        }
        finish_sums(invocation);
        if (invocation < HEADS) {
            common_totals[group * HEADS + invocation] = sum_parts[invocation * INVOCATIONS];
        }
    }
}

fn ranged_output(mean: f32, head: u32, total: f32, channel: u32) -> f32 {
    return mean + common_totals[channel / GROUP_CHANNELS * HEADS + head] / total;
}

// -------- tiles --------

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

// -------- token --------

// One range per token: v = s u + m with u = c + 2^(bits-1), or one norm: v = s u with u = (c + 1/2) · unit. The scale
// is multiplied into the weight before it becomes an integer. The rest, p (m + 2^(bits-1) s), is one sum per head.
//
// needs: HEADS, INVOCATIONS, LANE_TOKENS, TILE_TOKENS, finish_sums, log_of_scales, rescale_acc, rescale_step,
//   scaled_reference, sum_parts, weight_sum, weights
// gives: begin_value_ranges, load_value_ranges, skip_value_ranges, skip_value_range, own_reference, take_value_ranges,
//   ranged_weight, finish_value_ranges, ranged_output
// binds: 6 value_ranges
// set by plans: VALUE_MIDDLE, VALUE_UNIT

@group(0) @binding(6) var<storage, read> value_ranges: array<u32>;

const VALUE_MIDDLE: f32 = 8f;
// The unit of a codebook's levels; 1 for affine codes.
const VALUE_UNIT: f32 = 1f;

var<private> value_range: array<vec2<f32>, LANE_TOKENS>;
// log2 of the scales.
var<private> log_scales: vec4<f32>;
var<private> min_sum: array<f32, HEADS>;
var<private> min_total: array<f32, HEADS>;

fn begin_value_ranges(invocation: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        min_sum[head] = 0f;
    }
}

fn load_value_ranges(tile_base: u32, lane: u32) {
    // unroll
    for (var i = 0u; i < LANE_TOKENS; i++) {
        value_range[i] = unpack2x16float(value_ranges[tile_base * TILE_TOKENS + i * 32u + lane]);
    }
    let scales = vec4<f32>(value_range[0].x, value_range[1].x, value_range[2].x, value_range[3].x);
    log_scales = log_of_scales(scales);
}

fn skip_value_ranges() {
    // unroll
    for (var i = 0u; i < LANE_TOKENS; i++) {
        value_range[i] = vec2<f32>(0f);
    }
}

// Tokens that do not exist: the page may still hold data of an earlier span there.
fn skip_value_range(i: u32) {
    value_range[i] = vec2<f32>(0f);
}

fn own_reference(head: u32) -> f32 {
    return scaled_reference(head, log_scales);
}

fn take_value_ranges() {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        var sum = 0f;
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            sum += weights[head * LANE_TOKENS + i] * (value_range[i].y + VALUE_MIDDLE * value_range[i].x);
        }
        min_sum[head] = min_sum[head] * rescale_acc[head] + sum * rescale_step[head];
    }
}

fn ranged_weight(weight: f32, i: u32) -> f32 {
    return saturate(weight * value_range[i].x);
}

fn finish_value_ranges(invocation: u32) {
    workgroupBarrier();
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        weight_sum[head] = min_sum[head];
    }
    finish_sums(invocation);
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        min_total[head] = sum_parts[head * INVOCATIONS];
    }
}

fn ranged_output(mean: f32, head: u32, total: f32, channel: u32) -> f32 {
    return VALUE_UNIT * (mean + min_total[head] / total);
}
