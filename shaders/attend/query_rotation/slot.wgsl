// Slot `query_rotation`: the query in the basis of rotated keys. By default keys are not rotated.
//
// gives: rotate_query

// Rotates part `part` of a query, four channels per invocation. Called by all invocations.
fn rotate_query(q: vec4<f32>, field: u32, part: u32) -> vec4<f32> {
    return q;
}
