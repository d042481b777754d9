// Slot `lse`: the natural log-sum-exp of every query and head, for a later merge. The default writes none.
//
// gives: write_row_lse

fn write_row_lse(row: u32, lse: f32) {}

// -------- f32 --------

// Writes the natural log-sum-exp of every query and head, for a later merge.
//
// gives: write_row_lse
// binds: 9 lse_rows

// [row][query head]
@group(0) @binding(9) var<storage, read_write> lse_rows: array<f32>;

fn write_row_lse(row: u32, lse: f32) {
    lse_rows[min(row, arrayLength(&lse_rows) - 1u)] = lse;
}
