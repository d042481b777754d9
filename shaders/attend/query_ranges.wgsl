// Slot `query_ranges`: ranges of the span that are folded into the query. By default keys have none.
//
// gives: existing_slot, scale_query, query_bias

// The range slot, clamped to the last one.
fn existing_slot(range_slot: u32) -> u32 {
    return range_slot;
}

// Four channels of a query times the scales that begin at `base`.
fn scale_query(q: vec4<f32>, base: u32) -> vec4<f32> {
    return q;
}

// The contribution of the middles of these ranges to every score.
fn query_bias(q: vec4<f32>, base: u32) -> f32 {
    return 0f;
}

// -------- span --------

// Per-channel ranges of the span: scale and minimum, [range slot][KV head][channel].
//
// needs: HEAD_DIM, KV_HEADS
// gives: existing_slot, scale_query, query_bias
// binds: 4 key_span_ranges
// set by plans: KEY_MIDDLE

@group(0) @binding(4) var<storage, read> key_span_ranges: array<vec2<f32>>;

const KEY_MIDDLE: f32 = 8f;

fn existing_slot(range_slot: u32) -> u32 {
    return min(range_slot, arrayLength(&key_span_ranges) / (KV_HEADS * HEAD_DIM) - 1u);
}

fn scale_query(q: vec4<f32>, base: u32) -> vec4<f32> {
    return q * vec4<f32>(
        key_span_ranges[base].x,
        key_span_ranges[base + 1u].x,
        key_span_ranges[base + 2u].x,
        key_span_ranges[base + 3u].x,
    );
}

fn query_bias(q: vec4<f32>, base: u32) -> f32 {
    var bias = 0f;
    // unroll
    for (var i = 0u; i < 4u; i++) {
        let range = key_span_ranges[base + i];
        bias += q[i] * (range.y + KEY_MIDDLE * range.x);
    }
    return bias;
}
