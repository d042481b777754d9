// Slot `run_keys`: eight neighbouring channels of a key, from memory to halves.
//
// Every choice has
//   const KEY_UNIT: f32
//     the factor of products with these halves
//   alias KeyWord
//     what is read of them
//   fn run_key_pages() -> u32
//   fn load_key(tile_base: u32, token: u32, eight: u32) -> KeyWord
//     channels 8 · eight onwards of a token of the tile
//   fn key_halves(word: KeyWord, eight: u32) -> Eight

// -------- channel --------

// Keys with a range per channel, which is folded into the query: halves are codes, counted from the middle.
//
// needs: CODES, Eight, code_halves
// gives: KEY_UNIT, KeyWord, load_key, key_halves

// import run_key_codes = attend/run_key_codes.wgsl#words

const KEY_UNIT: f32 = 1f;

alias KeyWord = vec2<u32>;

fn load_key(tile_base: u32, token: u32, eight: u32) -> KeyWord {
    return load_key_codes(tile_base, token, eight);
}

fn key_halves(word: KeyWord, eight: u32) -> Eight {
    return code_halves(word, eight, KEY_BITS, CODES + f16(1u << (KEY_BITS - 1u)));
}

// -------- channel_4bit --------

// Keys of 4 bits with a range per channel, which is folded into the query: halves are codes.
//
// needs: EIGHTS, Eight, KV_HEADS, TILE_TOKENS
// gives: KEY_UNIT, KeyWord, run_key_pages, load_key, key_halves
// binds: 3 keys

// import attend/codes.wgsl#four_bits

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

// -------- channel_tokens --------

// Keys with a range per channel and group of tokens: k = s c + m. Lanes of neighbouring tokens read the same ranges.
//
// needs: CODES, EIGHTS, Eight, Half2, Half4, TILE_TOKENS, code_halves
// gives: KEY_UNIT, KeyWord, load_key, key_halves
// binds: 4 key_ranges
// set by plans: KEY_TOKEN_GROUPS

// import run_key_codes = attend/run_key_codes.wgsl#words

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

// -------- f16 --------

// Keys in f16.
//
// needs: EIGHTS, Eight, Half4, KV_HEADS, TILE_TOKENS
// gives: KEY_UNIT, KeyWord, run_key_pages, load_key, key_halves
// binds: 3 keys

const KEY_UNIT: f32 = 1f;

alias KeyWord = vec4<u32>;

@group(0) @binding(3) var<storage, read> keys: array<vec4<u32>>;

fn run_key_pages() -> u32 {
    return arrayLength(&keys) / (EIGHTS * TILE_TOKENS * KV_HEADS);
}

fn load_key(tile_base: u32, token: u32, eight: u32) -> KeyWord {
    return keys[(tile_base * EIGHTS + eight) * TILE_TOKENS + token];
}

fn key_halves(word: KeyWord, eight: u32) -> Eight {
    let a = vec2<f16>(unpack2x16float(word.x));
    let b = vec2<f16>(unpack2x16float(word.y));
    let c = vec2<f16>(unpack2x16float(word.z));
    let d = vec2<f16>(unpack2x16float(word.w));
    return Eight(Half4(a, b), Half4(c, d));
}

// -------- levels --------

// Keys as levels of a codebook times the norm of their token. The unit of levels is that of the products.
//
// needs: Eight, Half2, TILE_TOKENS
// gives: KEY_UNIT, KeyWord, load_key, key_halves
// binds: 4 key_ranges
// set by plans: KEY_UNIT

// import run_key_codes = attend/run_key_codes.wgsl#words
// import attend/codes.wgsl#level_halves

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

// -------- token --------

// Keys with a range per token and group of channels, or one per token: k = s c + m.
//
// needs: CODES, EIGHTS, Eight, Half2, TILE_TOKENS, code_halves
// gives: KEY_UNIT, KeyWord, load_key, key_halves
// binds: 4 key_ranges
// set by plans: KEY_CHANNEL_GROUPS

// import run_key_codes = attend/run_key_codes.wgsl#words

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

// -------- token_4bit --------

// Keys of 4 bits with a range per token: k = s c + m.
//
// needs: EIGHTS, Eight, KV_HEADS, TILE_TOKENS
// gives: KEY_UNIT, KeyWord, run_key_pages, load_key, key_halves
// binds: 3 keys, 4 key_ranges

// import attend/codes.wgsl#four_bits

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
