// Slot `run_value_codes`: codes of values as they are stored, for the kernels that take many queries.
//
// Every choice has
//   const VALUE_BITS: u32
//   fn run_value_pages() -> u32
//   fn load_value_codes(tile_base: u32, vector: u32, channel: u32) -> vec2<u32>
//     the words that hold eight tokens of a channel of the tile

// -------- words --------

// Codes of values in their memory order, VALUE_BITS each.
//
// needs: HEAD_DIM, KV_HEADS, TOKEN_VECTORS
// gives: VALUE_BITS, run_value_pages, load_value_codes
// binds: 5 values
// set by plans: VALUE_BITS

// import attend/codes.wgsl#code_halves

@group(0) @binding(5) var<storage, read> values: array<u32>;

const VALUE_BITS: u32 = 4u;
const VALUE_WORDS: u32 = TOKEN_VECTORS * VALUE_BITS / 4u;

fn run_value_pages() -> u32 {
    return arrayLength(&values) / (VALUE_WORDS * HEAD_DIM * KV_HEADS);
}

fn value_word(tile_base: u32, word: u32, channel: u32) -> u32 {
    let vector = tile_base * (VALUE_WORDS / 4u) + word / 4u;
    return values[(vector * HEAD_DIM + channel) * 4u + word % 4u];
}

fn load_value_codes(tile_base: u32, vector: u32, channel: u32) -> vec2<u32> {
    return vec2<u32>(
        value_word(tile_base, first_word(vector, VALUE_BITS), channel),
        value_word(tile_base, second_word(vector, VALUE_BITS), channel),
    );
}

// -------- pairs --------

// Codes of values of 8 bits: eight of them are two words next to each other, which one load brings.
//
// needs: HEAD_DIM, KV_HEADS, TOKEN_VECTORS
// gives: VALUE_BITS, run_value_pages, load_value_codes
// binds: 5 values

// import attend/codes.wgsl#code_halves

@group(0) @binding(5) var<storage, read> values: array<vec2<u32>>;

const VALUE_BITS: u32 = 8u;

fn run_value_pages() -> u32 {
    return arrayLength(&values) / (TOKEN_VECTORS * HEAD_DIM * KV_HEADS);
}

fn load_value_codes(tile_base: u32, vector: u32, channel: u32) -> vec2<u32> {
    let at = tile_base * (TOKEN_VECTORS / 2u) + vector / 2u;
    return values[(at * HEAD_DIM + channel) * 2u + vector % 2u];
}
