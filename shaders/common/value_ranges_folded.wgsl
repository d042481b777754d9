// Per-channel ranges of the span: v = s u + m with u = c + 2^(bits-1), applied once to every output.

// Scale and minimum: [range slot][KV head][channel].
@group(0) @binding(6) var<storage, read> value_span_ranges: array<vec2<f32>>;

const VALUE_MIDDLE: f32 = 8f;

fn begin_value_ranges() {}

fn load_value_ranges(tile_base: u32, lane: u32) {}

fn skip_value_ranges() {}

fn skip_value_range(i: u32) {}

fn enter_value_ranges(parity: u32) {}

fn take_value_ranges(parity: u32) {}

fn ranged_weight(weight: f32, i: u32) -> f32 {
    return weight;
}

fn largest_value_scale() -> f32 {
    return 1f;
}

fn finish_value_ranges(invocation: u32) {}

fn ranged_output(mean: f32, head: u32, total: f32, range_slot: u32, kv_head: u32, channel: u32) -> f32 {
    let range = value_span_ranges[(range_slot * KV_HEADS + kv_head) * HEAD_DIM + channel];
    return range.x * (mean + VALUE_MIDDLE) + range.y;
}
