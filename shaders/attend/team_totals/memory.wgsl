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
