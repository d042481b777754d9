// Slot `key_codes`: four codes of packed keys as the floats 0 … 2^bits - 1.
//
// Every choice has
//   const KEY_PLANES: u32
//   const KEY_WORD_FIELDS: u32
//     as in key_field/slot.wgsl
//   fn key_codes(words: KeyVector, w: u32, plane: u32) -> vec4<f32>
