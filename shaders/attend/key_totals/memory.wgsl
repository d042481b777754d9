// The largest scaled query of a tile and head, and the constant part of the scores of every group, computed through
// workgroup memory: each lane of the team computes those of one group and head. The lanes that own tokens score them,
// so a lane meets all groups.
//
// needs: HEADS, HEAD_DIM, KEY_TOKEN_GROUPS, QUERY_VECTORS, STEP_TILES, field_middles, field_ranges, field_scales,
//   group_biases, inverse_unit, query
// gives: LANE_GROUPS, scored_group, scored_token, enter_key_totals, team_largest, finish_key_totals

// Groups that the tokens of a lane lie in.
const LANE_GROUPS: u32 = KEY_TOKEN_GROUPS;

// [tile of the step][group][head]
var<workgroup> group_largest: array<f32, STEP_TILES * KEY_TOKEN_GROUPS * HEADS>;

fn scored_group(lane: u32, n: u32) -> u32 {
    return n;
}

fn scored_token(lane: u32, i: u32) -> u32 {
    return i * 32u + lane;
}

fn enter_key_totals(tile_base: u32, team: u32, lane: u32) {
    for (var pair = lane; pair < KEY_TOKEN_GROUPS * HEADS; pair += 32u) {
        var largest = 0f;
        var bias = 0f;
        for (var field = 0u; field < HEAD_DIM / 4u; field++) {
            let ranges = field_ranges(tile_base, pair / HEADS, field);
            let scales = field_scales(ranges);
            let q = query[pair % HEADS * QUERY_VECTORS + field];
            let magnitude = abs(q * scales);
            largest = max(largest, max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w)));
            bias += dot(q, field_middles(ranges, scales));
        }
        group_largest[team * KEY_TOKEN_GROUPS * HEADS + pair] = largest;
        group_biases[team * KEY_TOKEN_GROUPS * HEADS + pair] = bias;
    }
    workgroupBarrier();
}

fn team_largest(own: f32, team: u32, head: u32) -> f32 {
    var largest = 0f;
    // unroll
    for (var group = 0u; group < KEY_TOKEN_GROUPS; group++) {
        largest = max(largest, group_largest[(team * KEY_TOKEN_GROUPS + group) * HEADS + head]);
    }
    return largest;
}

fn finish_key_totals(team: u32, lane: u32) {
    for (var pair = lane; pair < KEY_TOKEN_GROUPS * HEADS; pair += 32u) {
        group_biases[team * KEY_TOKEN_GROUPS * HEADS + pair] *= inverse_unit(team_largest(0f, team, pair % HEADS));
    }
}
