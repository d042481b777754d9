// Keys that are stored rotated: the rotated query has the same products with them.

// import common/rotate_row.wgsl

fn rotate_query(q: vec4<f32>, field: u32) -> vec4<f32> {
    if (field < HEAD_DIM / 4u) {
        // unroll
        for (var i = 0u; i < 4u; i++) {
            rotated[field * 4u + i] = rotation_input(q[i], field * 4u + i);
        }
    }
    rotate_row(field);
    var turned = vec4<f32>(0f);
    if (field < HEAD_DIM / 4u) {
        turned = vec4<f32>(
            rotated[field * 4u],
            rotated[field * 4u + 1u],
            rotated[field * 4u + 2u],
            rotated[field * 4u + 3u],
        );
    }
    return turned;
}
