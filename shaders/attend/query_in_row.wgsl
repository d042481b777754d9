// A query in workgroup memory, four channels per invocation, to be rotated.
//
// needs: HEAD_DIM
// gives: put_query, rotated_query

// import common/rotate_row.wgsl

fn put_query(q: vec4<f32>, field: u32) {
    if (field < HEAD_DIM / 4u) {
        // unroll
        for (var i = 0u; i < 4u; i++) {
            let place = input_place(field * 4u + i);
            rotated[place] = rotation_input(q[i], place);
        }
    }
}

fn rotated_query(field: u32) -> vec4<f32> {
    if (field >= HEAD_DIM / 4u) {
        return vec4<f32>(0f);
    }
    return vec4<f32>(rotated[field * 4u], rotated[field * 4u + 1u], rotated[field * 4u + 2u], rotated[field * 4u + 3u]);
}
