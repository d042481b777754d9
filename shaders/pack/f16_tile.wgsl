// The places of halves in a tile of f16.
//
// needs: TILE_TOKENS, call, half_to_single
// gives: f16_tile_words, f16_word, f16_bits

// Words of one load.
const F16_VECTOR: u32 = 4u;

fn f16_tile_words() -> u32 {
    return TILE_TOKENS / 2u * call.head_dim;
}

// Word of the tile that is word `word` of run `run`, of `runs` runs.
fn f16_word(run: u32, runs: u32, word: u32) -> u32 {
    return (word / F16_VECTOR * runs + run) * F16_VECTOR + word % F16_VECTOR;
}

// One half of a word as the bits of an f32.
fn f16_bits(word: u32, half: u32) -> u32 {
    return half_to_single((word >> (16u * half)) & 0xffffu);
}
