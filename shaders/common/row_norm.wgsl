// The norm of a single row, stored beside the tile and kept, as it was rounded, for the codes.

// import common/norm.wgsl

@group(0) @binding(3) var<storage, read_write> ranges: array<u32>;

var<workgroup> row_squares: array<f32, HEAD_DIM / 4u>;
var<workgroup> row_norm: f32;

fn stored_norm(place: Place, kv_head: u32, token: u32) -> f32 {
    return row_norm;
}

fn store_row_ranges(place: Place, kv_head: u32, invocation: u32) {
    if (invocation < HEAD_DIM / 4u) {
        row_squares[invocation] = sum_of_four(vec4<f32>(
            channel_value(invocation * 4u),
            channel_value(invocation * 4u + 1u),
            channel_value(invocation * 4u + 2u),
            channel_value(invocation * 4u + 3u),
        ));
    }
    workgroupBarrier();
    if (invocation == 0u) {
        var sum = 0f;
        for (var i = 0u; i < HEAD_DIM / 4u; i++) {
            sum = rounded(sum + row_squares[i]);
        }
        let norm = norm_bits(sum);
        ranges[(place.page * call.kv_heads + kv_head) * call.ranges_per_tile + place.slot] = norm;
        row_norm = half_value(norm);
    }
    workgroupBarrier();
}
