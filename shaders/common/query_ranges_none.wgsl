// Keys without ranges of the span: nothing to fold into the query.

fn scale_query(q: vec4<f32>, base: u32) -> vec4<f32> {
    return q;
}

fn query_bias(q: vec4<f32>, base: u32) -> f32 {
    return 0f;
}
