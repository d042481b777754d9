// Fields of packed keys of 3 bits. A vector of three words holds eight field groups: low pairs of bits in two words,
// top bits in the third.
//
// needs: KeyVector
// gives: KEY_PLANES, KEY_WORD_FIELDS, key_codes

const KEY_PLANES: u32 = 8u;
const KEY_WORD_FIELDS: u32 = 1u;

fn key_codes(words: KeyVector, w: u32, plane: u32) -> vec4<f32> {
    let low = select(words[0], words[1], plane >= 4u) >> (plane % 4u * 2u);
    let top = words[2] >> plane;
    return vec4<f32>(unpack4xU8(((low & 0x03030303u) | ((top & 0x01010101u) << 2u)) ^ 0x04040404u));
}
