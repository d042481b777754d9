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
