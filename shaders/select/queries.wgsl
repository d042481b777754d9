// Slot `queries`: the elements of a second dense tensor, next to `rows`.
//
// Every choice has
//   fn query_element(index: u32) -> f32

// -------- bf16 --------

// Elements of a dense bf16 tensor, two to a word, the first in the low half: the high halves of f32 elements.
//
// gives: query_element
// binds: 2 queries

@group(0) @binding(2) var<storage, read> queries: array<u32>;

fn query_element(index: u32) -> f32 {
    return bitcast<f32>((queries[index / 2u] >> (16u * (index % 2u))) << 16u);
}

// -------- f16 --------

// Elements of a dense f16 tensor, two to a word, the first in the low half.
//
// gives: query_element
// binds: 2 queries

// import pack/half.wgsl#conversions

@group(0) @binding(2) var<storage, read> queries: array<u32>;

fn query_element(index: u32) -> f32 {
    return half_value(queries[index / 2u] >> (16u * (index % 2u)));
}

// -------- f32 --------

// Elements of a dense f32 tensor.
//
// gives: query_element
// binds: 2 queries

@group(0) @binding(2) var<storage, read> queries: array<u32>;

fn query_element(index: u32) -> f32 {
    return bitcast<f32>(queries[index]);
}
