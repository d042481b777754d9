// Codes of values in their memory order, VALUE_BITS each.
//
// needs: HEAD_DIM, KV_HEADS, TOKEN_VECTORS
// gives: VALUE_BITS, run_value_pages, load_value_codes
// binds: 5 values
// set by plans: VALUE_BITS

// import attend/code_halves.wgsl

@group(0) @binding(5) var<storage, read> values: array<u32>;

const VALUE_BITS: u32 = 4u;
const VALUE_WORDS: u32 = TOKEN_VECTORS * VALUE_BITS / 4u;

fn run_value_pages() -> u32 {
    return arrayLength(&values) / (VALUE_WORDS * HEAD_DIM * KV_HEADS);
}

fn value_word(tile_base: u32, word: u32, channel: u32) -> u32 {
    let vector = tile_base * (VALUE_WORDS / 4u) + word / 4u;
    return values[(vector * HEAD_DIM + channel) * 4u + word % 4u];
}

fn load_value_codes(tile_base: u32, vector: u32, channel: u32) -> vec2<u32> {
    return vec2<u32>(
        value_word(tile_base, first_word(vector, VALUE_BITS), channel),
        value_word(tile_base, second_word(vector, VALUE_BITS), channel),
    );
}
