// Slot `counting`: counts the keys at or above each row's threshold. The default counts nothing.
//
// gives: clear_counts, reaches, count_rows

// Sets the counts of a part to 0.
fn clear_counts(first_count: u32, invocation: u32) {}

// 1 if the score counts for row `row` of all query heads, otherwise 0.
fn reaches(score: f32, row: u32) -> u32 {
    return 0u;
}

// Adds the keys of all invocations to the counts of the staged rows. Bit r is set if the invocation's key counts for
// row first + r.
fn count_rows(reached_rows: u32, first: u32, first_count: u32, invocation: u32) {}

// -------- rows --------

// Counts, for each row, the keys at or above its threshold.
//
// needs: RESIDENT, STAGED, call
// gives: clear_counts, reaches, count_rows
// binds: 5 row_max, 6 count_partials

// [query_head][row].
@group(0) @binding(5) var<storage, read> row_max: array<f32>;
// [part][query_head][row].
@group(0) @binding(6) var<storage, read_write> count_partials: array<u32>;

const LANES: u32 = RESIDENT / STAGED;

// Bit r of an invocation is set if its key counts for staged row r.
var<workgroup> reached: array<u32, RESIDENT>;
var<workgroup> lane_counts: array<u32, RESIDENT>;

// By the invocations that add to the rows: barriers of a workgroup do not order storage.
fn clear_counts(first_count: u32, invocation: u32) {
    for (var g = 0u; g < call.group && invocation % LANES == 0u; g++) {
        for (var row = invocation / LANES; row < call.rows; row += STAGED) {
            count_partials[first_count + g * call.rows + row] = 0u;
        }
    }
}

fn reaches(score: f32, row: u32) -> u32 {
    return select(0u, 1u, score >= row_max[row] + call.log_threshold);
}

// One invocation owns each row's count.
fn count_rows(reached_rows: u32, first: u32, first_count: u32, invocation: u32) {
    reached[invocation] = reached_rows;
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
