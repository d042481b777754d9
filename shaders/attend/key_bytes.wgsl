// Slot `key_bytes`: four channels of packed keys as signed bytes, for integer dot products.
//
// Every choice has
//   const KEY_QUADS: u32
//     sets of four field groups in a vector
//   fn key_bytes(words: KeyVector, quad: u32, f: u32) -> u32
//     field group `f` of set `quad` of a vector, in the order of use, which is that of
//     attend/prepared_query.wgsl#query_fields

// -------- levels --------

// Signed bytes of a field group of keys, codes of a codebook.
//
// needs: KEY_VECTOR, KeyVector
// gives: KEY_BITS, KEY_PLANES, KEY_QUADS, key_bytes
// set by plans: KEY_BITS

// import attend/codes.wgsl#level_bytes

const KEY_BITS: u32 = 4u;
const KEY_PLANES: u32 = 8u / KEY_BITS;
// Sets of four field groups in a vector: KEY_VECTOR words of the top bit plane, then of the one below.
const KEY_QUADS: u32 = KEY_VECTOR * KEY_PLANES / 4u;

fn key_bytes(words: KeyVector, quad: u32, f: u32) -> u32 {
    let plane = KEY_PLANES - 1u - (quad * (4u / KEY_VECTOR) + f / KEY_VECTOR);
    return level_bytes(words[f % KEY_VECTOR] >> (plane * KEY_BITS), KEY_BITS);
}

// -------- three --------

// Signed bytes of a field group of keys of 3 bits. A vector of three words holds eight field groups, the last first:
// low pairs of bits in two words, top bits in the third.
//
// needs: KeyVector
// gives: KEY_QUADS, key_bytes

// import three_bytes = attend/three_bytes.wgsl#top

const KEY_QUADS: u32 = 2u;

fn key_bytes(words: KeyVector, quad: u32, f: u32) -> u32 {
    let pairs = select(words[0], words[1], quad == 0u) >> (2u * (3u - f));
    let tops = words[2] >> (7u - quad * 4u - f);
    return three_bytes((pairs & 0x03030303u) | ((tops & 0x01010101u) << 2u));
}

// -------- top --------

// Signed bytes of a field group of keys, affine codes. A field shifted to the top of its byte is the signed code times
// 2^(8-bits). The scale compensates for this factor.
//
// needs: KEY_VECTOR, KeyVector
// gives: KEY_BITS, KEY_PLANES, KEY_QUADS, key_bytes
// set by plans: KEY_BITS, KEY_MASK

const KEY_BITS: u32 = 4u;
// The top KEY_BITS bits of every byte.
const KEY_MASK: u32 = 4042322160u;
const KEY_PLANES: u32 = 8u / KEY_BITS;
// Sets of four field groups in a vector: KEY_VECTOR words of the top bit plane, then of the one below.
const KEY_QUADS: u32 = KEY_VECTOR * KEY_PLANES / 4u;

fn key_bytes(words: KeyVector, quad: u32, f: u32) -> u32 {
    return (words[f % KEY_VECTOR] << ((quad * (4u / KEY_VECTOR) + f / KEY_VECTOR) * KEY_BITS)) & KEY_MASK;
}
