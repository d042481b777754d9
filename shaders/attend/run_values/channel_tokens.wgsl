// Values with a range per channel and group of tokens: v = s c + m.
//
// needs: Eight, HEAD_DIM, Half4
// gives: ValueWord, load_value, value_halves, run_output
// binds: 6 value_ranges
// set by plans: VALUE_TOKEN_GROUPS

// import attend/run_value_codes.wgsl

// Groups of tokens in a tile: 1, 2 or 4.
const VALUE_TOKEN_GROUPS: u32 = 4u;

struct ValueWord {
    codes: vec2<u32>,
    // Ranges of the tokens of every quarter of the tile.
    ranges: vec4<u32>,
}

@group(0) @binding(6) var<storage, read> value_ranges: array<u32>;

fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord {
    var word: ValueWord;
    word.codes = load_value_codes(tile_base, vector, channel);
    // unroll
    for (var i = 0u; i < 4u; i++) {
        let group = tile_base * VALUE_TOKEN_GROUPS + i * VALUE_TOKEN_GROUPS / 4u;
        word.ranges[i] = value_ranges[group * HEAD_DIM + channel];
    }
    return word;
}

fn value_halves(word: ValueWord, vector: u32) -> Eight {
    let codes = code_halves(word.codes, vector, VALUE_BITS, CODES);
    let a = Half2(unpack2x16float(word.ranges.x));
    let b = Half2(unpack2x16float(word.ranges.y));
    let c = Half2(unpack2x16float(word.ranges.z));
    let d = Half2(unpack2x16float(word.ranges.w));
    let scales = Half4(a.x, b.x, c.x, d.x);
    let lowest = Half4(a.y, b.y, c.y, d.y);
    return Eight(fma(codes.low, scales, lowest), fma(codes.high, scales, lowest));
}

fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>) -> vec4<f32> {
    return mean;
}
