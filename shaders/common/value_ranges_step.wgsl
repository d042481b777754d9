// Ranges per token and group of channels, where weights are relative to the largest of a step: scales are so too.

// import common/value_ranges_groups.wgsl

const VALUE_MIDDLE: f32 = 8f;

// Largest scales of the step by group, as bits: scales are not negative, so their bits are ordered. Two sets as for maxima.
var<workgroup> largest_scales: array<atomic<u32>, 2u * WEIGHT_GROUPS>;

// Of the group of the invocation's channels.
var<private> own_largest_scale: f32;
// 1 / the largest scale: [group].
var<private> scale_units: array<f32, WEIGHT_GROUPS>;

fn begin_value_ranges(invocation: u32) {
    if (invocation < 2u * WEIGHT_GROUPS) {
        atomicStore(&largest_scales[invocation], 0u);
    }
    begin_common_sums();
}

fn enter_value_ranges(parity: u32, team: u32, lane: u32) {
    // unroll
    for (var group = 0u; group < WEIGHT_GROUPS; group++) {
        let entered = largest_to_enter(bitcast<u32>(largest_group_scale(group)));
        if (enters()) {
            atomicMax(&largest_scales[parity * WEIGHT_GROUPS + group], entered);
        }
    }
}

fn take_value_ranges(parity: u32, team: u32, lane: u32) {
    own_largest_scale = bitcast<f32>(atomicLoad(&largest_scales[parity * WEIGHT_GROUPS + weight_group(team, lane)]));
    // unroll
    for (var group = 0u; group < WEIGHT_GROUPS; group++) {
        // Where every scale of the step is 0, so are all weights.
        scale_units[group] = 1f / max(bitcast<f32>(atomicLoad(&largest_scales[parity * WEIGHT_GROUPS + group])), 1e-30f);
        atomicStore(&largest_scales[(1u - parity) * WEIGHT_GROUPS + group], 0u);
        let middles = group_minima(group) + VALUE_MIDDLE * group_scales(group);
        // unroll
        for (var head = 0u; head < HEADS; head++) {
            let p = vec4<f32>(weights[head * 4u], weights[head * 4u + 1u], weights[head * 4u + 2u], weights[head * 4u + 3u]);
            common_sums[group * HEADS + head] = common_sums[group * HEADS + head] * keep[head] + dot(p, middles) * enter[head];
        }
    }
}

fn ranged_weight(weight: f32, group: u32, i: u32) -> f32 {
    return weight * min(unpack2x16float(value_range[group * LANE_TOKENS + i]).x * scale_units[group], 1f);
}

fn largest_value_scale() -> f32 {
    return own_largest_scale;
}
