// Counts, for each row, the keys at or above its threshold.
//
// needs: RESIDENT, STAGED, call, sees
// gives: clear_counts, count_rows
// binds: 5 row_max, 6 count_partials

// [query_head][row].
@group(0) @binding(5) var<storage, read> row_max: array<f32>;
// [part][query_head][row].
@group(0) @binding(6) var<storage, read_write> count_partials: array<u32>;

const LANES: u32 = RESIDENT / STAGED;

// Bit r of an invocation: its key counts for staged row r.
var<workgroup> reached: array<u32, RESIDENT>;
var<workgroup> lane_counts: array<u32, RESIDENT>;

fn clear_counts(first_count: u32, invocation: u32) {
    if (invocation % LANES == 0u) {
        for (var i = invocation / LANES; i < call.group * call.rows; i += STAGED) {
            count_partials[first_count + i] = 0u;
        }
    }
}

// Adds the counts of the staged rows to those of the part; one invocation owns each.
fn count_rows(
    own_scores: array<f32, STAGED>, first: u32, query_head: u32, token: u32, first_count: u32, invocation: u32
) {
    var bits = 0u;
    // unroll
    for (var r = 0u; r < STAGED; r++) {
        if (sees(first + r, token)) {
            let least = row_max[query_head * call.rows + first + r] + call.log_threshold;
            bits |= select(0u, 1u << r, own_scores[r] >= least);
        }
    }
    reached[invocation] = bits;
    workgroupBarrier();
    let row = invocation / LANES;
    let lane = invocation % LANES;
    var count = 0u;
    for (var i = lane; i < RESIDENT; i += LANES) {
        count += (reached[i] >> row) & 1u;
    }
    lane_counts[invocation] = count;
    workgroupBarrier();
    if (lane == 0u && first + row < call.rows) {
        var total = 0u;
        for (var i = 0u; i < LANES; i++) {
            total += lane_counts[row * LANES + i];
        }
        count_partials[first_count + first + row] += total;
    }
}
