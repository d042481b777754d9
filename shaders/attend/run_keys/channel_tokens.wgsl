// Keys with a range per channel and group of tokens: k = s c + m. Lanes of neighbouring tokens read the same ranges.
//
// needs: EIGHTS, Eight, Half4, TILE_TOKENS
// gives: KEY_UNIT, KeyWord, load_key, key_halves
// binds: 4 key_ranges
// set by plans: KEY_TOKEN_GROUPS

// import attend/run_key_codes.wgsl

// Groups of tokens in a tile: 1, 2 or 4.
const KEY_TOKEN_GROUPS: u32 = 4u;
const KEY_UNIT: f32 = 1f;

struct KeyWord {
    codes: vec2<u32>,
    // Where the ranges of its channels begin. They are read when the codes become halves: loading them with the codes
    // would take eight more registers.
    ranges: u32,
}

// Of four neighbouring channels.
@group(0) @binding(4) var<storage, read> key_ranges: array<vec4<u32>>;

fn load_key(tile_base: u32, token: u32, eight: u32) -> KeyWord {
    let group = tile_base * KEY_TOKEN_GROUPS + token * KEY_TOKEN_GROUPS / TILE_TOKENS;
    return KeyWord(load_key_codes(tile_base, token, eight), (group * EIGHTS + eight) * 2u);
}

// Codes of four channels as keys.
fn ranged_keys(codes: Half4, ranges: vec4<u32>) -> Half4 {
    let a = Half2(unpack2x16float(ranges.x));
    let b = Half2(unpack2x16float(ranges.y));
    let c = Half2(unpack2x16float(ranges.z));
    let d = Half2(unpack2x16float(ranges.w));
    return fma(codes, Half4(a.x, b.x, c.x, d.x), Half4(a.y, b.y, c.y, d.y));
}

fn key_halves(word: KeyWord, eight: u32) -> Eight {
    let codes = code_halves(word.codes, eight, KEY_BITS, CODES);
    return Eight(ranged_keys(codes.low, key_ranges[word.ranges]), ranged_keys(codes.high, key_ranges[word.ranges + 1u]));
}
