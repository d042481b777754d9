// Keys of 4 bits with a range per channel, which is folded into the query: halves are codes.
//
// needs: EIGHTS, Eight, KV_HEADS, TILE_TOKENS
// gives: KEY_UNIT, KeyWord, run_key_pages, load_key, key_halves
// binds: 3 keys

// import attend/four_bits.wgsl

const KEY_UNIT: f32 = 1f;

alias KeyWord = u32;

@group(0) @binding(3) var<storage, read> keys: array<vec4<u32>>;

fn run_key_pages() -> u32 {
    return arrayLength(&keys) / (EIGHTS / 4u * TILE_TOKENS * KV_HEADS);
}

fn load_key(tile_base: u32, token: u32, eight: u32) -> KeyWord {
    return keys[(tile_base * (EIGHTS / 4u) + eight / 4u) * TILE_TOKENS + token][eight % 4u];
}

fn key_halves(word: KeyWord, eight: u32) -> Eight {
    return code_halves(word, SIGNED_CODES);
}
