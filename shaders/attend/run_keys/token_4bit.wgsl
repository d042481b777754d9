// Keys of 4 bits with a range per token: k = s c + m.
//
// needs: EIGHTS, Eight, KV_HEADS, TILE_TOKENS
// gives: KEY_UNIT, KeyWord, run_key_pages, load_key, key_halves
// binds: 3 keys, 4 key_ranges

// import attend/four_bits.wgsl

const KEY_UNIT: f32 = 1f;

struct KeyWord {
    codes: u32,
    range: u32,
}

@group(0) @binding(3) var<storage, read> keys: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> key_ranges: array<u32>;

fn run_key_pages() -> u32 {
    return arrayLength(&keys) / (EIGHTS / 4u * TILE_TOKENS * KV_HEADS);
}

fn load_key(tile_base: u32, token: u32, eight: u32) -> KeyWord {
    let codes = keys[(tile_base * (EIGHTS / 4u) + eight / 4u) * TILE_TOKENS + token][eight % 4u];
    return KeyWord(codes, key_ranges[tile_base * TILE_TOKENS + token]);
}

fn key_halves(word: KeyWord, eight: u32) -> Eight {
    let range = Half2(unpack2x16float(word.range));
    let codes = code_halves(word.codes, CODES);
    return Eight(fma(codes.low, range.xxxx, range.yyyy), fma(codes.high, range.xxxx, range.yyyy));
}
