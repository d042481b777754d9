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
