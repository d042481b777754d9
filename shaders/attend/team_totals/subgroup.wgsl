// The maximum and two sums over the 32 lanes of a team, by shuffles: invocations are numbered subgroup by subgroup (see
// attend/numbering/subgroup.wgsl), and subgroups have at least 32 lanes. Every lane of the team gets them.
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
