// Slot `counting`: the counts of keys at or above each row's threshold. By default nothing is counted.
//
// needs: STAGED
// gives: clear_counts, count_rows

// Sets the counts of a part to 0.
fn clear_counts(first_count: u32, invocation: u32) {}

// Adds those of the staged rows.
fn count_rows(
    own_scores: array<f32, STAGED>, first: u32, query_head: u32, token: u32, first_count: u32, invocation: u32
) {
}
