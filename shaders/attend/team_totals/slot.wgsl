// Slot `team_totals`: a maximum and two sums over the 32 lanes of a team (query/own.wgsl).
//
// Every choice has
//   fn enter_totals(own: u32, parts: vec3<f32>, head: u32, lane: u32)
//     enters the lane's parts of query head `head`, which is number `own` of its team
//   fn team_totals(own: u32, head: u32) -> vec3<f32>
//     for every lane of the team
//
// gives: totals_entered

// Called by all invocations between the two.
fn totals_entered() {}
