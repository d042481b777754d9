// Slot `query_ranges`: ranges of the span that are folded into the query. By default keys have none.
//
// gives: existing_slot, scale_query, query_bias

// The range slot, clamped to the last one.
fn existing_slot(range_slot: u32) -> u32 {
    return range_slot;
}

// Four channels of a query times the scales that begin at `base`.
fn scale_query(q: vec4<f32>, base: u32) -> vec4<f32> {
    return q;
}

// The contribution of the middles of these ranges to every score.
fn query_bias(q: vec4<f32>, base: u32) -> f32 {
    return 0f;
}
