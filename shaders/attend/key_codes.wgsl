// Slot `key_codes`: four codes of packed keys as the floats 0 … 2^bits - 1.
//
// Every choice has
//   const KEY_PLANES: u32
//   const KEY_WORD_FIELDS: u32
//     as in key_field.wgsl
//   fn key_codes(words: KeyVector, w: u32, plane: u32) -> vec4<f32>

// -------- planes --------

// A field group of packed keys: one bit plane of a word, as the codes 0 … 2^bits - 1.
//
// needs: KEY_VECTOR, KeyVector
// gives: KEY_BITS, KEY_PLANES, KEY_WORD_FIELDS, key_codes
// set by plans: KEY_BITS

const KEY_BITS: u32 = 4u;
const KEY_PLANES: u32 = 8u / KEY_BITS;
const KEY_WORD_FIELDS: u32 = KEY_VECTOR;

fn key_codes(words: KeyVector, w: u32, plane: u32) -> vec4<f32> {
    // Flipping the top bit of a field turns the stored two's complement back into the code.
    let flipped = (words[w] >> (plane * KEY_BITS)) ^ (0x01010101u << (KEY_BITS - 1u));
    return vec4<f32>(unpack4xU8(flipped & (0x01010101u * ((1u << KEY_BITS) - 1u))));
}

// -------- three --------

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
