// Keys in f16.
//
// needs: EIGHTS, Eight, KV_HEADS, TILE_TOKENS
// gives: KEY_UNIT, KeyWord, run_key_pages, load_key, key_halves
// binds: 3 keys

const KEY_UNIT: f32 = 1f;

alias KeyWord = Eight;

@group(0) @binding(3) var<storage, read> keys: array<Eight>;

fn run_key_pages() -> u32 {
    return arrayLength(&keys) / (EIGHTS * TILE_TOKENS * KV_HEADS);
}

fn load_key(tile_base: u32, token: u32, eight: u32) -> KeyWord {
    return keys[(tile_base * EIGHTS + eight) * TILE_TOKENS + token];
}

fn key_halves(word: KeyWord, eight: u32) -> Eight {
    return word;
}
