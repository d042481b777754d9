// Keys with sketches: part 0 of a query is in the basis of the signs, part 1 in that of the levels.
//
// gives: rotate_query

// import attend/query_in_row.wgsl
// import common/sketch_row.wgsl

fn rotate_query(q: vec4<f32>, field: u32, part: u32) -> vec4<f32> {
    put_query(q, field);
    rotate_row(field);
    if (part == 0u) {
        sketch_row(field);
    }
    return rotated_query(field);
}
