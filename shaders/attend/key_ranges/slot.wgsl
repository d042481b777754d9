// Slot `key_ranges`: turns an integer dot product into a score.
//
// Every choice has
//   fn ranged_score(sum: f32, constants: vec4<f32>, i: u32) -> f32
//     the score of token `i` of the lane, of its dot product and the constants of the prepared query: (scale, bias, Σ q, 0)
//
// gives: load_key_ranges

// Called once per tile, between its products and its scores. Reads the ranges of the lane's tokens.
fn load_key_ranges(tile_base: u32, lane: u32) {}
