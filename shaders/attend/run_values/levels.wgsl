// Values as levels of a codebook times the norm of their token. The unit of levels is that of the outputs.
//
// needs: Eight, Half4, TILE_TOKENS
// gives: ValueWord, load_value, value_halves, run_output
// binds: 6 value_ranges
// set by plans: VALUE_UNIT

// import attend/run_value_codes.wgsl
// import attend/level_halves.wgsl

struct ValueWord {
    codes: vec2<u32>,
    // Norms of tokens 2 vector + 32 i and of the tokens after them.
    norms: array<vec2<u32>, 4>,
}

// 128 units of the codebook.
const VALUE_UNIT: f32 = 1f;

// Norms of two neighbouring tokens.
@group(0) @binding(6) var<storage, read> value_ranges: array<vec2<u32>>;

fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord {
    var word: ValueWord;
    word.codes = load_value_codes(tile_base, vector, channel);
    // unroll
    for (var i = 0u; i < 4u; i++) {
        word.norms[i] = value_ranges[tile_base * (TILE_TOKENS / 2u) + i * 16u + vector];
    }
    return word;
}

fn value_halves(word: ValueWord, vector: u32) -> Eight {
    let levels = level_halves(word.codes, vector, VALUE_BITS);
    var norms: array<Half4, 2>;
    // unroll
    for (var next = 0u; next < 2u; next++) {
        // unroll
        for (var i = 0u; i < 4u; i++) {
            norms[next][i] = Half2(unpack2x16float(word.norms[i][next])).x;
        }
    }
    return Eight(levels.low * norms[0], levels.high * norms[1]);
}

fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>) -> vec4<f32> {
    return mean * VALUE_UNIT;
}
