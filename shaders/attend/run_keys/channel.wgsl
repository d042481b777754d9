// Keys with a range per channel, which is folded into the query: halves are codes, counted from the middle.
//
// needs: Eight
// gives: KEY_UNIT, KeyWord, load_key, key_halves

// import attend/run_key_codes.wgsl

const KEY_UNIT: f32 = 1f;

alias KeyWord = vec2<u32>;

fn load_key(tile_base: u32, token: u32, eight: u32) -> KeyWord {
    return load_key_codes(tile_base, token, eight);
}

fn key_halves(word: KeyWord, eight: u32) -> Eight {
    return code_halves(word, eight, KEY_BITS, CODES + f16(1u << (KEY_BITS - 1u)));
}
