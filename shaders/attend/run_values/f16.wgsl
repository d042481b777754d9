// Values in f16.
//
// needs: Eight, HEAD_DIM, KV_HEADS, TOKEN_VECTORS
// gives: ValueWord, run_value_pages, load_value, value_halves, run_output
// binds: 5 values

alias ValueWord = Eight;

@group(0) @binding(5) var<storage, read> values: array<Eight>;

fn run_value_pages() -> u32 {
    return arrayLength(&values) / (TOKEN_VECTORS * HEAD_DIM * KV_HEADS);
}

fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord {
    return values[(tile_base * TOKEN_VECTORS + vector) * HEAD_DIM + channel];
}

fn value_halves(word: ValueWord, vector: u32) -> Eight {
    return word;
}

fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>) -> vec4<f32> {
    return mean;
}
