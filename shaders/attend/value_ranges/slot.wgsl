// Slot `value_ranges`: ranges of packed values that are summed by integer dot products: which go into the weights, and
// which into the outputs. A choice may also have those of values/slot.wgsl that concern ranges.
//
// Every choice has
//   fn ranged_output(mean: f32, head: u32, total: f32, channel: u32) -> f32
//     the output of a channel, of the mean that the integers give and the sum of weights
//
// gives: begin_value_ranges, take_value_ranges, ranged_weight, largest_value_scale, enter_weights, enter_value_tile,
//   leave_value_tile, enter_block, channel_scale, finish_value_ranges

// Called before the first step.
fn begin_value_ranges(invocation: u32) {}

// Called when the weights of a step are known, before they become integers.
fn take_value_ranges(parity: u32) {}

// The weight of token `i` of the lane, relative to the largest weight of a step, times its scale relative to
// the largest scale.
fn ranged_weight(weight: f32, i: u32) -> f32 {
    return weight;
}

// The largest scale of the step.
fn largest_value_scale() -> f32 {
    return 1f;
}

// Called when the weights of a step are made, with the sum of the lane's for a head as integers of one byte.
fn enter_weights(head: u32, weights: u32, parity: u32, team: u32, lane: u32) {}

// Called before and after a tile enters the sums.
fn enter_value_tile(tile_base: u32, team: u32, lane: u32) {}

fn leave_value_tile() {}

// Called as block `pair` of tile `tile` of the step enters them, with what its integers are multiplied with.
fn enter_block(tile: u32, pair: u32, head: u32, scale: f32) {}

// What sums of channel `k` of the lane are multiplied with as they enter.
fn channel_scale(k: u32) -> f32 {
    return 1f;
}

// Called once before the outputs are written, by all invocations.
fn finish_value_ranges(invocation: u32) {}
