// Slot `key_field`: four channels of keys as floats.
//
// Every choice has
//   const KEY_PLANES: u32
//   const KEY_WORD_FIELDS: u32
//     a vector holds KEY_WORD_FIELDS · KEY_PLANES field groups, the planes of one word side by side
//   fn key_field(words: KeyVector, w: u32, plane: u32, i: u32) -> vec4<f32>
//     of token `i` of the lane
//
// gives: begin_key_field

// Called before the field group `field` of the lane's tokens is used. Reads their ranges.
fn begin_key_field(tile_base: u32, lane: u32, field: u32) {}
