// Keys with one range per channel of the span: k = s c + m, where they are not folded into the query. A range is the same
// for all lanes.

// import key_codes = common/key_codes.wgsl

// Scale and minimum: [range slot][KV head][channel].
@group(0) @binding(4) var<storage, read> key_span_ranges: array<vec2<f32>>;

var<private> key_scale: vec4<f32>;
var<private> key_min: vec4<f32>;

fn begin_key_field(tile_base: u32, lane: u32, field: u32) {
    // Channels past the head, in rows that fill no vector, meet a zero query: any range in bounds will do.
    let base = span_range_base + min(field, HEAD_DIM / 4u - 1u) * 4u;
    // unroll
    for (var i = 0u; i < 4u; i++) {
        let range = key_span_ranges[base + i];
        key_scale[i] = range.x;
        key_min[i] = range.y;
    }
}

fn key_field(words: KeyVector, w: u32, plane: u32, i: u32) -> vec4<f32> {
    return key_codes(words, w, plane) * key_scale + key_min;
}
