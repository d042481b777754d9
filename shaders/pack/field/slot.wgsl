// Slot `field`: decodes a field of a tile, and encodes a number as the bits of a field. `append` and `quantize` use the
// encoding, `dequantize` uses the decoding. Each takes a choice that has the function.
//
// A choice may have
//   fn field_bits(value: f32, place: Place, kv_head: u32, token: u32, channel: u32) -> u32
//   fn field_value(field: u32, place: Place, kv_head: u32, token: u32, channel: u32) -> f32
//     the token counts from the first of the page
