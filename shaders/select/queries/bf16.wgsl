// Elements of a dense bf16 tensor, two to a word, the first in the low half: the high halves of f32 elements.
//
// gives: query_element
// binds: 2 queries

@group(0) @binding(2) var<storage, read> queries: array<u32>;

fn query_element(index: u32) -> f32 {
    return bitcast<f32>((queries[index / 2u] >> (16u * (index % 2u))) << 16u);
}
