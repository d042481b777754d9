// A field group of f16 keys is two words.
//
// needs: KEY_VECTOR, KeyVector
// gives: KEY_WORD_FIELDS, KEY_PLANES, key_field

const KEY_WORD_FIELDS: u32 = KEY_VECTOR / 2u;
const KEY_PLANES: u32 = 1u;

fn key_field(words: KeyVector, w: u32, plane: u32, i: u32) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(words[w * 2u]), unpack2x16float(words[w * 2u + 1u]));
}
