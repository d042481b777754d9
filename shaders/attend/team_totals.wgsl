// Slot `team_totals`: a maximum and two sums over the 32 lanes of a team (query.wgsl#own).
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

// -------- memory --------

// The maximum and two sums over the 32 lanes of a team, through workgroup memory that holds the sums of an item at its
// end. Every lane of the team gets them, summed in the same order.
//
// needs: HEADS, INVOCATIONS, sum_parts
// gives: enter_totals, totals_entered, team_totals

fn enter_totals(own: u32, parts: vec3<f32>, head: u32, lane: u32) {
    if (head < HEADS) {
        sum_parts[head * INVOCATIONS + lane] = parts.x;
        sum_parts[head * INVOCATIONS + 32u + lane] = parts.y;
        sum_parts[head * INVOCATIONS + 64u + lane] = parts.z;
    }
}

fn totals_entered() {
    workgroupBarrier();
}

fn team_totals(own: u32, head: u32) -> vec3<f32> {
    var totals = vec3<f32>(0f);
    for (var lane = 0u; lane < 32u; lane++) {
        let at = head * INVOCATIONS + lane;
        totals = vec3<f32>(max(totals.x, sum_parts[at]), totals.y + sum_parts[at + 32u], totals.z + sum_parts[at + 64u]);
    }
    return totals;
}

// -------- subgroup --------

// The maximum and two sums over the 32 lanes of a team, by shuffles: invocations are numbered subgroup by subgroup (see
// attend/numbering.wgsl#subgroup), and subgroups have at least 32 lanes. Every lane of the team gets them.
//
// needs: TEAM_HEADS
// gives: enter_totals, team_totals

// [own head of the team]
var<private> totals_of_team: array<vec3<f32>, TEAM_HEADS>;

fn enter_totals(own: u32, parts: vec3<f32>, head: u32, lane: u32) {
    var totals = parts;
    // unroll
    for (var step = 0u; step < 5u; step++) {
        let other = subgroupShuffleXor(totals, 1u << step);
        totals = vec3<f32>(max(totals.x, other.x), totals.yz + other.yz);
    }
    totals_of_team[own] = totals;
}

fn team_totals(own: u32, head: u32) -> vec3<f32> {
    return totals_of_team[own];
}
