// Slot `value_codes`: four codes of packed values as the floats 0 … 2^bits - 1.
//
// Every choice has
//   const VALUE_PLANES: u32
//   const VALUE_WORD_FIELDS: u32
//   const VALUE_VECTORS: u32
//     as in value_field/slot.wgsl
//   fn value_codes(words: ValueVector, w: u32, plane: u32) -> vec4<f32>
