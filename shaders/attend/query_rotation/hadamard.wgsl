// Rotates the query for rotated keys. The products stay the same.
//
// gives: rotate_query

// import attend/query_in_row.wgsl

fn rotate_query(q: vec4<f32>, field: u32, part: u32) -> vec4<f32> {
    put_query(q, field);
    rotate_row(field);
    return rotated_query(field);
}
