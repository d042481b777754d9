// Slot `sketch_fields`: four fields of keys with sketches at the bottom of their bytes. Higher bits are ignored.
//
// Every choice has
//   const KEY_QUADS: u32
//     sets of four field groups in a vector
//   fn key_fields(words: KeyVector, quad: u32, f: u32) -> u32
//     in the order of use, as in key_bytes.wgsl

// -------- planes --------

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

// -------- three --------

// 3-bit fields of keys with sketches at the bottom of their bytes. A vector of three words holds eight field groups,
// the last first: low pairs of bits in two words, top bits in the third.
//
// needs: KeyVector
// gives: KEY_QUADS, key_fields

const KEY_QUADS: u32 = 2u;

fn key_fields(words: KeyVector, quad: u32, f: u32) -> u32 {
    let pairs = select(words[0], words[1], quad == 0u) >> (2u * (3u - f));
    let tops = words[2] >> (7u - quad * 4u - f);
    return (pairs & 0x03030303u) | ((tops & 0x01010101u) << 2u);
}
