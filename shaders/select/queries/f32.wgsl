// Elements of a dense f32 tensor.
//
// gives: query_element
// binds: 2 queries

@group(0) @binding(2) var<storage, read> queries: array<u32>;

fn query_element(index: u32) -> f32 {
    return bitcast<f32>(queries[index]);
}
