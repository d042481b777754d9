// Slot `key_totals`: totals of the query over the channels of a head, by group of tokens (step_scores.wgsl#groups).
// Where these lie decides which tokens a lane scores.
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

// -------- memory --------

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

// -------- subgroup --------

// The largest scaled query of a tile and head and the constant part of the scores of every group, by reductions over
// the team: invocations are numbered subgroup by subgroup (see attend/numbering.wgsl#subgroup), and subgroups have 32
// lanes. A lane scores four tokens of one group, so that it meets one query per head. Where a tile has several groups
// it hands the scores to the lanes that own the tokens: 32 · quarter + 8 i + j is scored by lane 8 · quarter + j, as
// its token quarter ^ i, and owned by lane 8 i + j.
//
// needs: HEADS, KEY_TOKEN_GROUPS, LANE_TOKENS, group_biases, token_scores
// gives: LANE_GROUPS, scored_group, scored_token, arrange_scores, add_bias, team_largest, finish_key_totals

// Each team scores a tile of its own, or none. A team is a subgroup, so that branch is the same for all of its lanes.
// The compiler of a browser cannot see this, so the next line is turned into a directive for it:
//
// diagnostic(off, subgroup_uniformity);

// Groups that the tokens of a lane lie in.
const LANE_GROUPS: u32 = 1u;

// Each lane's part: [group][head].
var<private> biases: array<f32, KEY_TOKEN_GROUPS * HEADS>;

fn scored_group(lane: u32, n: u32) -> u32 {
    return lane / 8u * KEY_TOKEN_GROUPS / 4u;
}

fn scored_token(lane: u32, i: u32) -> u32 {
    return select(lane / 8u * 32u + ((lane / 8u) ^ i) * 8u + lane % 8u, i * 32u + lane, KEY_TOKEN_GROUPS == 1u);
}

// Four lanes, 8 apart, exchange four scores each. Score i goes to the lane whose number differs by 8 i. That lane takes
// it for its token of the quarter that differs from its own by i.
fn arrange_scores(head: u32, lane: u32) {
    if (KEY_TOKEN_GROUPS == 1u) {
        return;
    }
    let a = token_scores[head * LANE_TOKENS];
    let b = subgroupShuffleXor(token_scores[head * LANE_TOKENS + 1u], 8u);
    let c = subgroupShuffleXor(token_scores[head * LANE_TOKENS + 2u], 16u);
    let d = subgroupShuffleXor(token_scores[head * LANE_TOKENS + 3u], 24u);
    let odd = (lane & 8u) != 0u;
    let upper = (lane & 16u) != 0u;
    let ab = select(a, b, odd);
    let ba = select(b, a, odd);
    let cd = select(c, d, odd);
    let dc = select(d, c, odd);
    token_scores[head * LANE_TOKENS] = select(ab, cd, upper);
    token_scores[head * LANE_TOKENS + 1u] = select(ba, dc, upper);
    token_scores[head * LANE_TOKENS + 2u] = select(cd, ab, upper);
    token_scores[head * LANE_TOKENS + 3u] = select(dc, ba, upper);
}

fn add_bias(i: u32, group: u32, head: u32, part: f32) {
    biases[group * HEADS + head] = select(biases[group * HEADS + head] + part, part, i == 0u);
}

fn team_largest(own: f32, team: u32, head: u32) -> f32 {
    // Bits of floats that are not negative are ordered.
    return bitcast<f32>(subgroupMax(bitcast<u32>(own)));
}

// Number of sums that remain after every exchange of halves.
const BIASES: u32 = KEY_TOKEN_GROUPS * HEADS;
const BIASES_1: u32 = (BIASES + 1u) / 2u;
const BIASES_2: u32 = (BIASES_1 + 1u) / 2u;
const BIASES_3: u32 = (BIASES_2 + 1u) / 2u;
const BIASES_4: u32 = (BIASES_3 + 1u) / 2u;
const BIASES_5: u32 = (BIASES_4 + 1u) / 2u;

// Of two sums the lane keeps the first, and the lane `apart` from it keeps the second. Each adds the other's part of
// its sum. Without a second sum, half of the lanes keep none.
fn exchanged(a: f32, b: f32, lane: u32, apart: u32) -> f32 {
    let odd = (lane & apart) != 0u;
    return select(a, b, odd) + subgroupShuffleXor(select(b, a, odd), apart);
}

// Sums all biases over the lanes. After five exchanges of halves a lane has one of them or none.
fn finish_key_totals(team: u32, lane: u32) {
    // unroll
    for (var i = 0u; i < BIASES_1; i++) {
        biases[i] = exchanged(biases[i], select(0f, biases[min(i + BIASES_1, BIASES - 1u)], i + BIASES_1 < BIASES), lane, 1u);
    }
    // unroll
    for (var i = 0u; i < BIASES_2; i++) {
        biases[i] = exchanged(biases[i], select(0f, biases[min(i + BIASES_2, BIASES_1 - 1u)], i + BIASES_2 < BIASES_1), lane, 2u);
    }
    // unroll
    for (var i = 0u; i < BIASES_3; i++) {
        biases[i] = exchanged(biases[i], select(0f, biases[min(i + BIASES_3, BIASES_2 - 1u)], i + BIASES_3 < BIASES_2), lane, 4u);
    }
    // unroll
    for (var i = 0u; i < BIASES_4; i++) {
        biases[i] = exchanged(biases[i], select(0f, biases[min(i + BIASES_4, BIASES_3 - 1u)], i + BIASES_4 < BIASES_3), lane, 8u);
    }
    // unroll
    for (var i = 0u; i < BIASES_5; i++) {
        biases[i] = exchanged(biases[i], select(0f, biases[min(i + BIASES_5, BIASES_4 - 1u)], i + BIASES_5 < BIASES_4), lane, 16u);
    }
    // The index of that sum, from the last exchange to the first.
    let at_4 = lane / 16u % 2u * BIASES_5;
    let at_3 = at_4 + lane / 8u % 2u * BIASES_4;
    let at_2 = at_3 + lane / 4u % 2u * BIASES_3;
    let at_1 = at_2 + lane / 2u % 2u * BIASES_2;
    let at = at_1 + lane % 2u * BIASES_1;
    if (at_4 < BIASES_4 && at_3 < BIASES_3 && at_2 < BIASES_2 && at_1 < BIASES_1 && at < BIASES) {
        group_biases[team * BIASES + at] = biases[0];
    }
}
