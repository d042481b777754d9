// Keys that are stored as they are: so is the query.

fn rotate_query(q: vec4<f32>, field: u32, part: u32) -> vec4<f32> {
    return q;
}
