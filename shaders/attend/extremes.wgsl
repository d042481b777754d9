// Slot `extremes`: the extremes of a calibrated span's scores, which `scores` collects. The default collects nothing.
//
// gives: reset_extremes

fn reset_extremes(row: u32, field: u32) {}

// -------- reset --------

// Extremes start below every score.
//
// gives: reset_extremes
// binds: 5 extremes

@group(0) @binding(5) var<storage, read_write> extremes: array<u32>;

fn reset_extremes(row: u32, field: u32) {
    if (field < 2u) {
        extremes[row * 2u + field] = 0u;
    }
}
