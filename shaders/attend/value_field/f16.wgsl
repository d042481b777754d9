// A field group of f16 values is two words.
//
// needs: ValueVector
// gives: VALUE_WORD_FIELDS, VALUE_PLANES, VALUE_VECTORS, value_field

const VALUE_WORD_FIELDS: u32 = 2u;
const VALUE_PLANES: u32 = 1u;
const VALUE_VECTORS: u32 = 16u;

fn value_field(words: ValueVector, w: u32, plane: u32, field: u32, k: u32) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(words[w * 2u]), unpack2x16float(words[w * 2u + 1u]));
}
