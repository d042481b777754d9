// One range per token: v = s u + m with u = c + 2^(bits-1), or one norm: v = s u with u = (c + 1/2) · unit. The scale
// is multiplied into the weight before it becomes an integer, relative to the step's largest scale. The rest, p (m +
// 2^(bits-1) s), is one sum per head.
//
// needs: HEADS, INVOCATIONS, LANE_TOKENS, TILE_TOKENS, enter, enters, finish_sums, keep, largest_to_enter, sum_parts,
//   weight_sum, weights
// gives: begin_value_ranges, load_value_ranges, skip_value_ranges, skip_value_range, enter_value_ranges,
//   take_value_ranges, ranged_weight, largest_value_scale, finish_value_ranges, ranged_output
// binds: 6 value_ranges
// set by plans: VALUE_MIDDLE, VALUE_UNIT

@group(0) @binding(6) var<storage, read> value_ranges: array<u32>;

const VALUE_MIDDLE: f32 = 8f;
// The unit of a codebook's levels; 1 for affine codes.
const VALUE_UNIT: f32 = 1f;

// Largest scale of the step, as bits: scales are not negative, so their bits are ordered. Two slots as for maxima.
var<workgroup> largest_scales: array<atomic<u32>, 2>;

var<private> value_range: array<vec2<f32>, LANE_TOKENS>;
var<private> largest_scale: f32;
var<private> min_sum: array<f32, HEADS>;
var<private> min_total: array<f32, HEADS>;

fn begin_value_ranges(invocation: u32) {
    atomicStore(&largest_scales[0], 0u);
    atomicStore(&largest_scales[1], 0u);
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

fn enter_value_ranges(parity: u32, team: u32, lane: u32) {
    let own = max(max(value_range[0].x, value_range[1].x), max(value_range[2].x, value_range[3].x));
    let entered = largest_to_enter(bitcast<u32>(own));
    if (enters()) {
        atomicMax(&largest_scales[parity], entered);
    }
}

fn take_value_ranges(parity: u32) {
    largest_scale = bitcast<f32>(atomicLoad(&largest_scales[parity]));
    atomicStore(&largest_scales[1u - parity], 0u);
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        var sum = 0f;
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            sum += weights[head * LANE_TOKENS + i] * (value_range[i].y + VALUE_MIDDLE * value_range[i].x);
        }
        min_sum[head] = min_sum[head] * keep[head] + sum * enter[head];
    }
}

fn ranged_weight(weight: f32, i: u32) -> f32 {
    // If every scale of the step is 0, all weights are 0.
    return weight * min(value_range[i].x / max(largest_scale, 1e-30f), 1f);
}

fn largest_value_scale() -> f32 {
    return largest_scale;
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
