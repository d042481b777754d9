// Signed bytes of a field group of values, affine codes. A field shifted to the top of its byte is the signed code
// times 2^(8-bits). The unit of weights compensates for this factor.
//
// gives: ValueVector, VALUE_PLANES, VALUE_VECTORS, VALUE_QUADS, VALUE_BYTE, value_bytes, unsigned_words,
//   unsigned_bytes, value_place
// set by plans: VALUE_BITS, VALUE_MASK

alias ValueVector = vec4<u32>;

const VALUE_BITS: u32 = 4u;
// The top VALUE_BITS bits of every byte.
const VALUE_MASK: u32 = 4042322160u;
const VALUE_PLANES: u32 = 8u / VALUE_BITS;
// Vectors of a channel's column in a tile, and sets of four field groups in a vector: one for each bit
// plane, from above.
const VALUE_VECTORS: u32 = VALUE_BITS;
const VALUE_QUADS: u32 = VALUE_PLANES;
const VALUE_BYTE: f32 = f32(1u << (8u - VALUE_BITS));
// The top bits of all fields of a word: of 1, 2, 4 or 8 bits each.
const VALUE_TOPS: u32 = 0x80808080u | (0x80808080u >> (VALUE_BITS % 8u)) | (0x80808080u >> (2u * VALUE_BITS % 8u)) |
    (0x80808080u >> (3u * VALUE_BITS % 8u)) | select(0u, 0xffffffffu, VALUE_BITS == 1u);

fn value_bytes(words: ValueVector, quad: u32, f: u32) -> u32 {
    return (words[f] << (quad * VALUE_BITS)) & VALUE_MASK;
}

// Adds 128 through the top bit of every field, once for a word instead of for everything extracted from it.
fn unsigned_words(words: ValueVector) -> ValueVector {
    return words ^ vec4<u32>(VALUE_TOPS);
}

fn unsigned_bytes(words: ValueVector, quad: u32, f: u32) -> u32 {
    return value_bytes(words, quad, f);
}

// Quad of the tile and place in it of field group `group`: word group / VALUE_PLANES of the column, bit plane
// group % VALUE_PLANES from below.
fn value_place(group: u32) -> vec2<u32> {
    let word = group / VALUE_PLANES;
    return vec2<u32>(word / 4u * VALUE_PLANES + (VALUE_PLANES - 1u - group % VALUE_PLANES), word % 4u);
}
