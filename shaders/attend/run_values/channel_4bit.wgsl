// Values of 4 bits with a range per channel of the span: halves are codes. v = s (c + 8) + m is computed from their
// mean.
//
// needs: Eight, HEAD_DIM, KV_HEADS, TOKEN_VECTORS
// gives: ValueWord, run_value_pages, load_value, value_halves, run_output
// binds: 5 values, 6 value_span_ranges

// import attend/four_bits.wgsl

alias ValueWord = u32;

@group(0) @binding(5) var<storage, read> values: array<vec4<u32>>;
// Scale and minimum: [range slot][KV head][channel].
@group(0) @binding(6) var<storage, read> value_span_ranges: array<vec2<f32>>;

fn run_value_pages() -> u32 {
    return arrayLength(&values) / (TOKEN_VECTORS / 4u * HEAD_DIM * KV_HEADS);
}

fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord {
    return values[(tile_base * (TOKEN_VECTORS / 4u) + vector / 4u) * HEAD_DIM + channel][vector % 4u];
}

fn value_halves(word: ValueWord, vector: u32) -> Eight {
    return code_halves(word, SIGNED_CODES);
}

fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>) -> vec4<f32> {
    let slot = min(range_slot, arrayLength(&value_span_ranges) / (KV_HEADS * HEAD_DIM) - 1u);
    let base = (slot * KV_HEADS + kv_head) * HEAD_DIM + channel;
    var output: vec4<f32>;
    // unroll
    for (var i = 0u; i < 4u; i++) {
        let range = value_span_ranges[base + i];
        output[i] = range.x * (mean[i] + 8f) + range.y;
    }
    return output;
}
