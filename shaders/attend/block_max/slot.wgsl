// Slot `block_max`: largest values over a block of eight lanes (values/byte.wgsl), BLOCK_MAXIMA of them in every step.
//
// Every choice has
//   fn enter_block_max(at: u32, own: f32, parity: u32, team: u32, lane: u32)
//     enters the lane's value of maximum `at`, before the first barrier of a step
//   fn block_max(at: u32, parity: u32, team: u32, lane: u32) -> f32
//     the maximum of the lane's block, after that barrier
//
// gives: begin_block_maxima

// Called before the first step.
fn begin_block_maxima(invocation: u32) {}
