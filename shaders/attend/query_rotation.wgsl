// Slot `query_rotation`: the query in the basis of rotated keys. By default keys are not rotated.
//
// gives: rotate_query

// Rotates part `part` of a query, four channels per invocation. Called by all invocations.
fn rotate_query(q: vec4<f32>, field: u32, part: u32) -> vec4<f32> {
    return q;
}

// -------- hadamard --------

// Rotates the query for rotated keys. The products stay the same.
//
// gives: rotate_query

// import attend/prepared_query.wgsl#query_in_row

fn rotate_query(q: vec4<f32>, field: u32, part: u32) -> vec4<f32> {
    put_query(q, field);
    rotate_row(field);
    return rotated_query(field);
}

// -------- sketch --------

// Keys with sketches: part 0 of a query is in the basis of the signs, part 1 in that of the levels.
//
// gives: rotate_query

// import attend/prepared_query.wgsl#query_in_row
// import common/rotation.wgsl#sketch_row

fn rotate_query(q: vec4<f32>, field: u32, part: u32) -> vec4<f32> {
    put_query(q, field);
    rotate_row(field);
    if (part == 0u) {
        sketch_row(field);
    }
    return rotated_query(field);
}
