// Slot `run_key_codes`: codes of keys as they are stored, for the kernels that take many queries.
//
// Every choice has
//   const KEY_BITS: u32
//   fn run_key_pages() -> u32
//   fn load_key_codes(tile_base: u32, token: u32, eight: u32) -> vec2<u32>
//     the words that hold channels 8 · eight onwards of a token of the tile

// -------- words --------

// Codes of keys in their memory order, KEY_BITS each.
//
// needs: EIGHTS, KV_HEADS, TILE_TOKENS
// gives: KEY_BITS, run_key_pages, load_key_codes
// binds: 3 keys
// set by plans: KEY_BITS, KEY_VECTOR

// import attend/codes.wgsl#code_halves

@group(0) @binding(3) var<storage, read> keys: array<u32>;

const KEY_BITS: u32 = 4u;
// Neighbouring words of a token.
const KEY_VECTOR: u32 = 4u;
const KEY_WORDS: u32 = EIGHTS * KEY_BITS / 4u;

fn run_key_pages() -> u32 {
    return arrayLength(&keys) / (KEY_WORDS * TILE_TOKENS * KV_HEADS);
}

fn key_word(tile_base: u32, token: u32, word: u32) -> u32 {
    let vector = tile_base * (KEY_WORDS / KEY_VECTOR) + word / KEY_VECTOR;
    return keys[(vector * TILE_TOKENS + token) * KEY_VECTOR + word % KEY_VECTOR];
}

fn load_key_codes(tile_base: u32, token: u32, eight: u32) -> vec2<u32> {
    return vec2<u32>(
        key_word(tile_base, token, first_word(eight, KEY_BITS)),
        key_word(tile_base, token, second_word(eight, KEY_BITS)),
    );
}

// -------- pairs --------

// Codes of keys of 8 bits: eight of them are two words next to each other, which one load brings.
//
// needs: EIGHTS, KV_HEADS, TILE_TOKENS
// gives: KEY_BITS, run_key_pages, load_key_codes
// binds: 3 keys

// import attend/codes.wgsl#code_halves

@group(0) @binding(3) var<storage, read> keys: array<vec2<u32>>;

const KEY_BITS: u32 = 8u;
// Neighbouring words of a token.
const KEY_VECTOR: u32 = 4u;
const KEY_PAIRS: u32 = KEY_VECTOR / 2u;

fn run_key_pages() -> u32 {
    return arrayLength(&keys) / (EIGHTS * TILE_TOKENS * KV_HEADS);
}

fn load_key_codes(tile_base: u32, token: u32, eight: u32) -> vec2<u32> {
    let vector = tile_base * (EIGHTS / KEY_PAIRS) + eight / KEY_PAIRS;
    return keys[(vector * TILE_TOKENS + token) * KEY_PAIRS + eight % KEY_PAIRS];
}
