// Values with one range per channel of the span: v = s c + m, where they are not applied to the output.

// import value_codes = common/value_codes.wgsl

// Scale and minimum: [range slot][KV head][channel].
@group(0) @binding(6) var<storage, read> value_span_ranges: array<vec2<f32>>;

var<private> value_range: array<vec2<f32>, CHANNELS>;

fn begin_value_tile(tile_base: u32, channel: u32, k: u32) {
    value_range[k] = value_span_ranges[span_range_base + channel];
}

fn value_field(words: ValueVector, w: u32, plane: u32, field: u32, k: u32) -> vec4<f32> {
    return value_codes(words, w, plane) * value_range[k].x + vec4<f32>(value_range[k].y);
}
