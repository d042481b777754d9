// Slot `row_ranges`: the ranges or norms of a row that is stored alone: made, stored beside the tile and kept for its
// codes. By default rows have none. A choice may also be the `ranges`, `norms` or `field` of the kernel.
//
// needs: Place
// gives: store_row_ranges

// Called by all invocations when the row is in workgroup memory.
fn store_row_ranges(place: Place, kv_head: u32, invocation: u32) {}
