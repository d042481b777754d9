// Slot `lse`: the natural log-sum-exp of every query and head, for a later merge. The default writes none.
//
// gives: write_row_lse

fn write_row_lse(row: u32, lse: f32) {}
