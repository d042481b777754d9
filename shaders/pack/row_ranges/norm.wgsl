// The norm of a single row. It is stored with the tile, and the rounded value is kept for the codes.
//
// needs: Place, call
// gives: stored_norm, store_row_ranges
// binds: 3 ranges

// import pack/half.wgsl
// import pack/row_norm_bits.wgsl

@group(0) @binding(3) var<storage, read_write> ranges: array<u32>;

var<private> row_norm: f32;

fn stored_norm(place: Place, kv_head: u32, token: u32) -> f32 {
    return row_norm;
}

fn store_row_ranges(place: Place, kv_head: u32, invocation: u32) {
    let norm = row_norm_bits(invocation);
    if (invocation == 0u) {
        ranges[(place.page * call.kv_heads + kv_head) * call.ranges_per_tile + place.slot] = norm;
    }
    row_norm = half_value(norm);
}
