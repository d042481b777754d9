// Keys that are stored rotated: the rotated query has the same products with them.
//
// gives: rotate_query

// import attend/query_in_row.wgsl

fn rotate_query(q: vec4<f32>, field: u32, part: u32) -> vec4<f32> {
    put_query(q, field);
    rotate_row(field);
    return rotated_query(field);
}
