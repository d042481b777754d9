// Slot `counting`: the counts of keys at or above each row's threshold. By default nothing is counted.
//
// gives: clear_counts, reaches, count_rows

// Sets the counts of a part to 0.
fn clear_counts(first_count: u32, invocation: u32) {}

// 1 if the score counts for row `row` of all query heads, 0 if not.
fn reaches(score: f32, row: u32) -> u32 {
    return 0u;
}

// Adds the keys of all invocations to the counts of the staged rows: bit r says that the invocation's key counts
// for row first + r.
fn count_rows(reached_rows: u32, first: u32, first_count: u32, invocation: u32) {}
