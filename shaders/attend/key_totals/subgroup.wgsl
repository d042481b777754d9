// The largest scaled query and the constant part of the scores of every quarter of a tile and head, by reductions over the
// team: invocations are numbered subgroup by subgroup (see attend/numbering/subgroup.wgsl), and subgroups have 32 lanes.
// A lane scores four tokens of one quarter, so that it meets one query per head, and hands the scores to the lanes that own
// the tokens: 32 · quarter + 8 i + j is scored by lane 8 · quarter + j and owned by lane 8 i + j.
//
// needs: HEADS, LANE_TOKENS, QUARTERS, group_totals, token_scores
// gives: LANE_QUARTERS, scored_quarter, scored_token, arrange_scores, team_largest, finish_key_totals

// Teams score tiles of their own, or none. As a team is a subgroup, that branch is the same for all of its lanes, which the
// compiler of a browser cannot see:
// diagnostic(off, subgroup_uniformity);

// Quarters of the tokens that a lane scores.
const LANE_QUARTERS: u32 = 1u;

// [head][quarter], each lane's part.
var<private> biases: array<vec4<f32>, HEADS>;
var<private> largest_scaled: array<vec4<f32>, HEADS>;

fn scored_quarter(lane: u32, n: u32) -> u32 {
    return lane / 8u;
}

fn scored_token(lane: u32, i: u32) -> u32 {
    return lane / 8u * 32u + i * 8u + lane % 8u;
}

// Four lanes, 8 apart, exchange four scores each: a transposition, by exchanging halves twice.
fn arrange_scores(head: u32, lane: u32) {
    // unroll
    for (var pair = 0u; pair < 2u; pair++) {
        let a = token_scores[head * LANE_TOKENS + pair * 2u];
        let b = token_scores[head * LANE_TOKENS + pair * 2u + 1u];
        let odd = (lane & 8u) != 0u;
        let got = subgroupShuffleXor(select(b, a, odd), 8u);
        token_scores[head * LANE_TOKENS + pair * 2u] = select(a, got, odd);
        token_scores[head * LANE_TOKENS + pair * 2u + 1u] = select(got, b, odd);
    }
    // unroll
    for (var pair = 0u; pair < 2u; pair++) {
        let a = token_scores[head * LANE_TOKENS + pair];
        let b = token_scores[head * LANE_TOKENS + pair + 2u];
        let upper = (lane & 16u) != 0u;
        let got = subgroupShuffleXor(select(b, a, upper), 16u);
        token_scores[head * LANE_TOKENS + pair] = select(a, got, upper);
        token_scores[head * LANE_TOKENS + pair + 2u] = select(got, b, upper);
    }
}

fn team_largest(largest: f32, bias: f32, at: u32, quarter: u32, head: u32) -> f32 {
    biases[head][quarter] = bias;
    // Bits of floats that are not negative are ordered.
    largest_scaled[head][quarter] = bitcast<f32>(subgroupMax(bitcast<u32>(largest)));
    return largest_scaled[head][quarter];
}

// Sums the four biases of a head over the lanes: after two exchanges of halves a lane has one of them.
fn finish_key_totals(team: u32, lane: u32) {
    let odd = (lane & 1u) != 0u;
    let upper = (lane & 2u) != 0u;
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        let all = biases[head];
        let two = select(all.xz, all.yw, odd) + subgroupShuffleXor(select(all.yw, all.xz, odd), 1u);
        var bias = select(two.x, two.y, upper) + subgroupShuffleXor(select(two.y, two.x, upper), 2u);
        bias += subgroupShuffleXor(bias, 4u);
        bias += subgroupShuffleXor(bias, 8u);
        bias += subgroupShuffleXor(bias, 16u);
        let largest = select(
            select(largest_scaled[head].x, largest_scaled[head].y, odd),
            select(largest_scaled[head].z, largest_scaled[head].w, odd),
            upper,
        );
        if (lane < QUARTERS) {
            group_totals[(team * QUARTERS + lane) * HEADS + head] = vec2<f32>(largest, bias);
        }
    }
}
