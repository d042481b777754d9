// Slot `row_ranges`: the ranges or norms of a single row. They are computed, stored with the tile and kept for its
// codes. By default rows have none. A choice may also serve as the `ranges`, `norms` or `field` of the kernel.
//
// needs: Place
// gives: store_row_ranges

// Called by all invocations once the row is in workgroup memory.
fn store_row_ranges(place: Place, kv_head: u32, invocation: u32) {}
