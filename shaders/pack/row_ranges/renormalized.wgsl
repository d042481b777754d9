// The norm of a single row. The rounded value is kept for the codes; divided by the norm of the levels, it is stored
// with the tile.
//
// needs: HEAD_DIM, Place, call, channel_value, level_field, level_value
// gives: stored_norm, store_row_ranges
// binds: 3 ranges

// import pack/half.wgsl
// import pack/row_norm_bits.wgsl

@group(0) @binding(3) var<storage, read_write> ranges: array<u32>;

var<private> row_norm: f32;

fn stored_norm(place: Place, kv_head: u32, token: u32) -> f32 {
    return row_norm;
}

fn row_level(channel: u32) -> f32 {
    return level_value(level_field(channel_value(channel), row_norm));
}

fn store_row_ranges(place: Place, kv_head: u32, invocation: u32) {
    row_norm = half_value(row_norm_bits(invocation));
    if (invocation < HEAD_DIM / 4u) {
        row_squares[invocation] = sum_of_four(vec4<f32>(
            row_level(invocation * 4u),
            row_level(invocation * 4u + 1u),
            row_level(invocation * 4u + 2u),
            row_level(invocation * 4u + 3u),
        ));
    }
    workgroupBarrier();
    if (invocation == 0u) {
        let at = (place.page * call.kv_heads + kv_head) * call.ranges_per_tile + place.slot;
        ranges[at] = renormalized_bits(row_norm, row_sum_of_squares());
    }
}
