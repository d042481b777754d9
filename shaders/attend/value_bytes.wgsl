// Slot `value_bytes`: four tokens of a channel of packed values as signed bytes, for integer dot products.
//
// Every choice has
//   alias ValueVector
//     what one load takes of a channel's column
//   const VALUE_VECTORS: u32
//     vectors of a column of a tile
//   const VALUE_QUADS: u32
//     sets of four field groups in a vector
//   const VALUE_BYTE: f32
//     distance between the bytes of neighbouring codes
//   fn value_bytes(words: ValueVector, quad: u32, f: u32) -> u32
//     field group `f` of set `quad` of a vector, in the order of use
//   fn value_place(group: u32) -> vec2<u32>
//     the set, counted over the tile, and the place in it of field group `group`: tokens group, group + 32, ...
//
// needs: ValueVector, value_bytes
// gives: unsigned_words, unsigned_bytes

// The same bytes plus 128. `unsigned_bytes` extracts them from the result of `unsigned_words` for a vector.
fn unsigned_words(words: ValueVector) -> ValueVector {
    return words;
}

fn unsigned_bytes(words: ValueVector, quad: u32, f: u32) -> u32 {
    return value_bytes(words, quad, f) ^ 0x80808080u;
}

// -------- levels --------

// Signed bytes of a field group of values, codes of a codebook.
//
// gives: ValueVector, VALUE_PLANES, VALUE_VECTORS, VALUE_QUADS, VALUE_BYTE, value_bytes, value_place
// set by plans: VALUE_BITS

// import attend/codes.wgsl#level_bytes

alias ValueVector = vec4<u32>;

const VALUE_BITS: u32 = 4u;
const VALUE_PLANES: u32 = 8u / VALUE_BITS;
// Vectors of a channel's column in a tile, and sets of four field groups in a vector: one for each bit plane.
const VALUE_VECTORS: u32 = VALUE_BITS;
const VALUE_QUADS: u32 = VALUE_PLANES;
const VALUE_BYTE: f32 = 1f;

fn value_bytes(words: ValueVector, quad: u32, f: u32) -> u32 {
    return level_bytes(words[f] >> (quad * VALUE_BITS), VALUE_BITS);
}

// Quad of the tile and place in it of field group `group`: word group / VALUE_PLANES of the column, bit plane
// group % VALUE_PLANES.
fn value_place(group: u32) -> vec2<u32> {
    let word = group / VALUE_PLANES;
    return vec2<u32>(word / 4u * VALUE_PLANES + group % VALUE_PLANES, word % 4u);
}

// -------- three --------

// Signed bytes of a field group of values of 3 bits. A vector of three words holds eight field groups: low pairs of
// bits in two words, top bits in the third.
//
// gives: ValueVector, VALUE_VECTORS, VALUE_QUADS, VALUE_BYTE, value_bytes, value_place

// import three_bytes = attend/three_bytes.wgsl#top

alias ValueVector = array<u32, 3>;

// Vectors of a channel's column in a tile, and sets of four field groups in a vector.
const VALUE_VECTORS: u32 = 4u;
const VALUE_QUADS: u32 = 2u;
const VALUE_BYTE: f32 = THREE_BYTE;

fn value_bytes(words: ValueVector, quad: u32, f: u32) -> u32 {
    let pairs = select(words[0], words[1], quad == 1u) >> (2u * f);
    let tops = words[2] >> (quad * 4u + f);
    return three_bytes((pairs & 0x03030303u) | ((tops & 0x01010101u) << 2u));
}

// Quad of the tile and place in it of field group `group`.
fn value_place(group: u32) -> vec2<u32> {
    return vec2<u32>(group / 4u, group % 4u);
}

// -------- top --------

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
