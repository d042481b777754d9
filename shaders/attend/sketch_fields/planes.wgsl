// Fields of keys with sketches at the bottom of their bytes. Higher bits are ignored.
//
// needs: KEY_BITS, KEY_VECTOR, KeyVector
// gives: KEY_PLANES, KEY_QUADS, key_fields

const KEY_PLANES: u32 = 8u / KEY_BITS;
// Sets of four field groups in a vector: KEY_VECTOR words of the top bit plane, then of the one below.
const KEY_QUADS: u32 = KEY_VECTOR * KEY_PLANES / 4u;

fn key_fields(words: KeyVector, quad: u32, f: u32) -> u32 {
    let plane = KEY_PLANES - 1u - (quad * (4u / KEY_VECTOR) + f / KEY_VECTOR);
    return words[f % KEY_VECTOR] >> (plane * KEY_BITS);
}
