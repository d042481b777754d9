// Slot `field`: what a field of a tile stands for, and the bits that a number gets. `append` and `quantize` ask for the
// bits, `dequantize` for the number, and each takes a choice that has it.
//
// A choice may have
//   fn field_bits(value: f32, place: Place, kv_head: u32, token: u32, channel: u32) -> u32
//   fn field_value(field: u32, place: Place, kv_head: u32, token: u32, channel: u32) -> f32
//     the token counts from the first of the page
