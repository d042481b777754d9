// Slot `value_ranges`: ranges of packed values that are summed with integer dot products. It decides which part is
// multiplied into the weights, and which into the outputs. A choice may also define the range functions of
// values/slot.wgsl.
//
// Every choice has
//   fn ranged_output(mean: f32, head: u32, total: f32, channel: u32) -> f32
//     the output of a channel, of the mean that the integers give and the sum of weights
//
// gives: begin_value_ranges, take_value_ranges, ranged_weight, largest_value_scale, enter_weights, enter_value_tile,
//   leave_value_tile, enter_block, channel_scale, finish_value_ranges

// Called before the first step.
fn begin_value_ranges(invocation: u32) {}

// Called once the weights of a step are known, before they become integers.
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

// Called once the weights of a step are computed, with the sum of the lane's one-byte weights for a head.
fn enter_weights(head: u32, weights: u32, parity: u32, team: u32, lane: u32) {}

// Called before and after a tile is added to the sums.
fn enter_value_tile(tile_base: u32, team: u32, lane: u32) {}

fn leave_value_tile() {}

// Called when block `pair` of tile `tile` of the step is added, with the factor of its integers.
fn enter_block(tile: u32, pair: u32, head: u32, scale: f32) {}

// The factor of the sums of channel `k` of the lane when they are added.
fn channel_scale(k: u32) -> f32 {
    return 1f;
}

// Called once before the outputs are written, by all invocations.
fn finish_value_ranges(invocation: u32) {}
