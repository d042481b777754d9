// Values with one range per token and group of channels: v = s u + m with u = c + 2^(bits-1). Scales are multiplied
// into the weights before these become integers, so every group of channels has its own weights. The rest is one sum
// per head and group: see byte_weights/groups.wgsl.
//
// needs: GROUP_CHANNELS, HEADS, INVOCATIONS, LANE_TOKENS, TILE_TOKENS, WEIGHT_GROUPS, finish_sums, sum_parts,
//   weight_sum
// gives: common_sums, begin_common_sums, load_value_ranges, skip_value_ranges, skip_value_range, group_scales,
//   group_minima, largest_group_scale, finish_value_ranges, ranged_output
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

fn largest_group_scale(group: u32) -> f32 {
    let scales = group_scales(group);
    return max(max(scales.x, scales.y), max(scales.z, scales.w));
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
