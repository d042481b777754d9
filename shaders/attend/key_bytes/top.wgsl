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
