// The largest scaled query and the constant part of the scores of every quarter of a tile and head, by way of workgroup
// memory: a lane of the team makes both of one quarter and head alone. Tokens are scored by the lanes that own them, so that
// a lane meets all four quarters.
//
// needs: HEADS, HEAD_DIM, QUARTERS, QUERY_VECTORS, field_ranges, group_totals, query
// gives: LANE_QUARTERS, scored_quarter, scored_token, enter_key_totals, team_largest

// Quarters of the tokens that a lane scores.
const LANE_QUARTERS: u32 = 4u;

fn scored_quarter(lane: u32, n: u32) -> u32 {
    return n;
}

fn scored_token(lane: u32, i: u32) -> u32 {
    return i * 32u + lane;
}

fn enter_key_totals(tile_base: u32, team: u32, lane: u32) {
    for (var pair = lane; pair < QUARTERS * HEADS; pair += 32u) {
        var totals = vec2<f32>(0f);
        for (var field = 0u; field < HEAD_DIM / 4u; field++) {
            let ranges = field_ranges(tile_base, pair / HEADS, field);
            let q = query[pair % HEADS * QUERY_VECTORS + field];
            let magnitude = abs(q * ranges.scale);
            let largest = max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w));
            totals = vec2<f32>(max(totals.x, largest), totals.y + dot(q, ranges.middle));
        }
        group_totals[team * QUARTERS * HEADS + pair] = totals;
    }
    workgroupBarrier();
}

fn team_largest(largest: f32, bias: f32, at: u32, quarter: u32, head: u32) -> f32 {
    return group_totals[at].x;
}
