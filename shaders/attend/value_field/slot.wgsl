// Slot `value_field`: four tokens of a channel of values as floats.
//
// Every choice has
//   const VALUE_PLANES: u32
//   const VALUE_WORD_FIELDS: u32
//     a vector holds VALUE_WORD_FIELDS · VALUE_PLANES field groups, the planes of one word side by side
//   const VALUE_VECTORS: u32
//     vectors of a column of a tile
//   fn value_field(words: ValueVector, w: u32, plane: u32, field: u32, k: u32) -> vec4<f32>
//     field group `field` of channel `k` of the lane
//
// gives: begin_value_tile

// Called before channel `k` of the lane is read from a tile. Reads its ranges.
fn begin_value_tile(tile_base: u32, channel: u32, k: u32) {}
