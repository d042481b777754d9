// Slot `extremes`: the extremes of a calibrated span's scores, which `scores` collects. The default collects nothing.
//
// gives: reset_extremes

fn reset_extremes(row: u32, field: u32) {}
