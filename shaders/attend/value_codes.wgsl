// Slot `value_codes`: four codes of packed values as the floats 0 … 2^bits - 1.
//
// Every choice has
//   const VALUE_PLANES: u32
//   const VALUE_WORD_FIELDS: u32
//   const VALUE_VECTORS: u32
//     as in value_field.wgsl
//   fn value_codes(words: ValueVector, w: u32, plane: u32) -> vec4<f32>

// -------- planes --------

// A field group of packed values: one bit plane of a word, as the codes 0 … 2^bits - 1.
//
// needs: ValueVector
// gives: VALUE_PLANES, VALUE_WORD_FIELDS, VALUE_VECTORS, value_codes
// set by plans: VALUE_BITS

const VALUE_BITS: u32 = 4u;
const VALUE_PLANES: u32 = 8u / VALUE_BITS;
const VALUE_WORD_FIELDS: u32 = 4u;
const VALUE_VECTORS: u32 = VALUE_BITS;

fn value_codes(words: ValueVector, w: u32, plane: u32) -> vec4<f32> {
    // Flipping the top bit of a field turns the stored two's complement back into the code.
    let flipped = (words[w] >> (plane * VALUE_BITS)) ^ (0x01010101u << (VALUE_BITS - 1u));
    return vec4<f32>(unpack4xU8(flipped & (0x01010101u * ((1u << VALUE_BITS) - 1u))));
}

// -------- three --------

// Fields of packed values of 3 bits. A vector of three words holds eight field groups: low pairs of bits in two words,
// top bits in the third.
//
// needs: ValueVector
// gives: VALUE_PLANES, VALUE_WORD_FIELDS, VALUE_VECTORS, value_codes

const VALUE_PLANES: u32 = 8u;
const VALUE_WORD_FIELDS: u32 = 1u;
const VALUE_VECTORS: u32 = 4u;

fn value_codes(words: ValueVector, w: u32, plane: u32) -> vec4<f32> {
    let low = select(words[0], words[1], plane >= 4u) >> (plane % 4u * 2u);
    let top = words[2] >> plane;
    return vec4<f32>(unpack4xU8(((low & 0x03030303u) | ((top & 0x01010101u) << 2u)) ^ 0x04040404u));
}
