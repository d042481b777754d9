// Rows that are stored without ranges.

fn store_row_ranges(place: Place, kv_head: u32, invocation: u32) {}
