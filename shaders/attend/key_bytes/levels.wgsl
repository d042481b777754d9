// Signed bytes of a field group of keys, codes of a codebook.
//
// needs: KEY_VECTOR, KeyVector
// gives: KEY_BITS, KEY_PLANES, KEY_QUADS, key_bytes
// set by plans: KEY_BITS

// import attend/level_bytes.wgsl

const KEY_BITS: u32 = 4u;
const KEY_PLANES: u32 = 8u / KEY_BITS;
// Sets of four field groups in a vector: KEY_VECTOR words of the top bit plane, then of the one below.
const KEY_QUADS: u32 = KEY_VECTOR * KEY_PLANES / 4u;

fn key_bytes(words: KeyVector, quad: u32, f: u32) -> u32 {
    let plane = KEY_PLANES - 1u - (quad * (4u / KEY_VECTOR) + f / KEY_VECTOR);
    return level_bytes(words[f % KEY_VECTOR] >> (plane * KEY_BITS), KEY_BITS);
}
