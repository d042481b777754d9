// Slot `lse`: the natural log-sum-exp of every query and head, for whoever merges further. By default
// nobody asks for it.
//
// gives: write_row_lse

fn write_row_lse(row: u32, lse: f32) {}
