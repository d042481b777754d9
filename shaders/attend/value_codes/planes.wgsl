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
