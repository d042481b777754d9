// Keys with a range per token and group of channels, or one per token: k = s c + m.
//
// needs: EIGHTS, Eight, TILE_TOKENS
// gives: KEY_UNIT, KeyWord, load_key, key_halves
// binds: 4 key_ranges
// set by plans: KEY_CHANNEL_GROUPS

// import attend/run_key_codes.wgsl

// Groups of a row, of whole eights of channels.
const KEY_CHANNEL_GROUPS: u32 = 1u;
const KEY_UNIT: f32 = 1f;

struct KeyWord {
    codes: vec2<u32>,
    range: u32,
}

@group(0) @binding(4) var<storage, read> key_ranges: array<u32>;

fn load_key(tile_base: u32, token: u32, eight: u32) -> KeyWord {
    let group = tile_base * KEY_CHANNEL_GROUPS + eight * KEY_CHANNEL_GROUPS / EIGHTS;
    return KeyWord(load_key_codes(tile_base, token, eight), key_ranges[group * TILE_TOKENS + token]);
}

fn key_halves(word: KeyWord, eight: u32) -> Eight {
    let range = Half2(unpack2x16float(word.range));
    let codes = code_halves(word.codes, eight, KEY_BITS, CODES);
    return Eight(fma(codes.low, range.xxxx, range.yyyy), fma(codes.high, range.xxxx, range.yyyy));
}
