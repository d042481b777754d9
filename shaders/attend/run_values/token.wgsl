// Values with a range per token and group of channels, or one per token: v = s c + m.
//
// needs: Eight, HEAD_DIM, Half4, TILE_TOKENS
// gives: ValueWord, load_value, value_halves, run_output
// binds: 6 value_ranges
// set by plans: VALUE_CHANNEL_GROUPS

// import attend/run_value_codes.wgsl

// Groups of channels of a row.
const VALUE_CHANNEL_GROUPS: u32 = 1u;

struct ValueWord {
    codes: vec2<u32>,
    // Ranges of tokens 2 vector + 32 i and of the tokens after them.
    ranges: array<vec2<u32>, 4>,
}

// Ranges of two neighbouring tokens.
@group(0) @binding(6) var<storage, read> value_ranges: array<vec2<u32>>;

fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord {
    var word: ValueWord;
    word.codes = load_value_codes(tile_base, vector, channel);
    let group = tile_base * VALUE_CHANNEL_GROUPS + channel * VALUE_CHANNEL_GROUPS / HEAD_DIM;
    // unroll
    for (var i = 0u; i < 4u; i++) {
        word.ranges[i] = value_ranges[group * (TILE_TOKENS / 2u) + i * 16u + vector];
    }
    return word;
}

fn value_halves(word: ValueWord, vector: u32) -> Eight {
    let codes = code_halves(word.codes, vector, VALUE_BITS, CODES);
    var scales: array<Half4, 2>;
    var lowest: array<Half4, 2>;
    // unroll
    for (var next = 0u; next < 2u; next++) {
        // unroll
        for (var i = 0u; i < 4u; i++) {
            let range = Half2(unpack2x16float(word.ranges[i][next]));
            scales[next][i] = range.x;
            lowest[next][i] = range.y;
        }
    }
    return Eight(fma(codes.low, scales[0], lowest[0]), fma(codes.high, scales[1], lowest[1]));
}

fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>) -> vec4<f32> {
    return mean;
}
