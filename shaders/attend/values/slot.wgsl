// Slot `values`: the weights of the tokens of a step and the weighted sums of values, in the order in which
// attend/softmax_loop.wgsl calls them.
//
// Every choice has
//   fn value_pages() -> u32
//     pages of the values that are bound
//   fn begin_values(invocation: u32)
//     once, before the first step
//   fn weigh(head: u32, step_max: f32, new_max: f32, parity: u32, team: u32, lane: u32) -> f32
//     makes the weights of the lane's tokens and returns their sum, relative to the new running maximum
//   fn store_weights(team: u32, lane: u32, parity: u32)
//     puts them where all invocations find them; a barrier follows
//   fn add_values(first: u32, tiles: u32, team: u32, lane: u32)
//     adds the values of the step, the first tile of which is `first`, to the running sums
//   fn write_states(item: WorkItem, y: u32, team: u32, lane: u32, invocation: u32)
//     writes the states of the item
//
// gives: read_output_ranges, load_value_ranges, skip_value_ranges, skip_value_range, enter_block_max,
//   enter_value_ranges

// Called with the first reads of an item. Reads the ranges that its outputs are scaled with.
fn read_output_ranges(range_slot: u32, kv_head: u32, invocation: u32) {}

// Called by the team of a tile. Reads the ranges of the lane's tokens. The other two are for tokens that do not exist:
// all of them, or token `i`.
fn load_value_ranges(tile_base: u32, lane: u32) {}

fn skip_value_ranges() {}

fn skip_value_range(i: u32) {}

// Called before the first barrier of a step. Records the values that other lanes need: the largest score of maximum
// `at`, and the ranges.
fn enter_block_max(at: u32, own: f32, parity: u32, team: u32, lane: u32) {}

fn enter_value_ranges(parity: u32, team: u32, lane: u32) {}
