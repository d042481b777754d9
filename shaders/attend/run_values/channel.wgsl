// Values with a range per channel of the span: halves are codes, counted from the middle. v = s (c + middle) + m is
// computed from their mean.
//
// needs: Eight, HEAD_DIM, KV_HEADS
// gives: ValueWord, load_value, value_halves, run_output
// binds: 6 value_span_ranges

// import attend/run_value_codes.wgsl

alias ValueWord = vec2<u32>;

// Scale and minimum: [range slot][KV head][channel].
@group(0) @binding(6) var<storage, read> value_span_ranges: array<vec2<f32>>;

const VALUE_MIDDLE: u32 = 1u << (VALUE_BITS - 1u);

fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord {
    return load_value_codes(tile_base, vector, channel);
}

fn value_halves(word: ValueWord, vector: u32) -> Eight {
    return code_halves(word, vector, VALUE_BITS, CODES + f16(VALUE_MIDDLE));
}

fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>) -> vec4<f32> {
    let slot = min(range_slot, arrayLength(&value_span_ranges) / (KV_HEADS * HEAD_DIM) - 1u);
    let base = (slot * KV_HEADS + kv_head) * HEAD_DIM + channel;
    var output: vec4<f32>;
    // unroll
    for (var i = 0u; i < 4u; i++) {
        let range = value_span_ranges[base + i];
        output[i] = range.x * (mean[i] + f32(VALUE_MIDDLE)) + range.y;
    }
    return output;
}
