// Slot `query_rotation`: the query in the basis of keys that are stored rotated. By default they are not.
//
// gives: rotate_query

// Four channels of part `part` of a query, an invocation each; called by all invocations.
fn rotate_query(q: vec4<f32>, field: u32, part: u32) -> vec4<f32> {
    return q;
}
