// Slot `byte_weights`: weights of one byte, relative to the largest of their block (values/byte.wgsl).
//
// Every choice has
//   const BLOCK_MAXIMA: u32
//     maxima that a block has: of the scores of every head, and what else the choice enters
//   fn weigh(head: u32, step_max: f32, new_max: f32, parity: u32, team: u32, lane: u32) -> f32
//   fn store_weights(team: u32, lane: u32, parity: u32)
//     as in values/slot.wgsl
