// Slot `key_totals`: totals of the query over the channels of a head, by group of tokens (scores/groups.wgsl). Where
// these lie decides which tokens a lane scores.
//
// Every choice has
//   const LANE_GROUPS: u32
//     groups of a tile that the tokens of a lane lie in
//   fn scored_group(lane: u32, n: u32) -> u32
//     the n-th of them
//   fn scored_token(lane: u32, i: u32) -> u32
//     the i-th token of the lane
//   fn team_largest(own: f32, team: u32, head: u32) -> f32
//     the largest |q s| of the tile: the largest of the team's lanes
//   fn finish_key_totals(team: u32, lane: u32)
//     called last: leaves `group_biases`
//
// gives: enter_key_totals, add_bias, arrange_scores

// Called first.
fn enter_key_totals(tile_base: u32, team: u32, lane: u32) {}

// Adds the part of field `i` of the lane to the bias of a group and head.
fn add_bias(i: u32, group: u32, head: u32, part: f32) {}

// Moves the scores of a head to the lanes that own the tokens.
fn arrange_scores(head: u32, lane: u32) {}
