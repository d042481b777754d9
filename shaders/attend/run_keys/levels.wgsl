// Keys as levels of a codebook times the norm of their token. The unit of levels is that of the products.
//
// needs: Eight, TILE_TOKENS
// gives: KEY_UNIT, KeyWord, load_key, key_halves
// binds: 4 key_ranges
// set by plans: KEY_UNIT

// import attend/run_key_codes.wgsl
// import attend/level_halves.wgsl

// 128 units of the codebook.
const KEY_UNIT: f32 = 1f;

struct KeyWord {
    codes: vec2<u32>,
    norm: u32,
}

@group(0) @binding(4) var<storage, read> key_ranges: array<u32>;

fn load_key(tile_base: u32, token: u32, eight: u32) -> KeyWord {
    return KeyWord(load_key_codes(tile_base, token, eight), key_ranges[tile_base * TILE_TOKENS + token]);
}

fn key_halves(word: KeyWord, eight: u32) -> Eight {
    let norm = Half2(unpack2x16float(word.norm)).x;
    let levels = level_halves(word.codes, eight, KEY_BITS);
    return Eight(levels.low * norm, levels.high * norm);
}
