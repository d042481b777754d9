// Slot `key_totals`: totals of the query over the channels of a head, by quarter of a tile (scores/groups.wgsl), and which
// tokens a lane scores, which follows from who has them.
//
// Every choice has
//   const LANE_QUARTERS: u32
//     quarters of a tile that the tokens of a lane lie in
//   fn scored_quarter(lane: u32, n: u32) -> u32
//     the n-th of them
//   fn scored_token(lane: u32, i: u32) -> u32
//     the i-th token of the lane
//   fn team_largest(largest: f32, bias: f32, at: u32, quarter: u32, head: u32) -> f32
//     the largest of the team's lanes; `at` is the place in `group_totals`, where this and the sum of the biases get to
//
// gives: enter_key_totals, finish_key_totals, arrange_scores

// Called before and after `team_largest` of all heads and quarters.
fn enter_key_totals(tile_base: u32, team: u32, lane: u32) {}

fn finish_key_totals(team: u32, lane: u32) {}

// Brings the scores of a head to the lanes that own the tokens.
fn arrange_scores(head: u32, lane: u32) {}
