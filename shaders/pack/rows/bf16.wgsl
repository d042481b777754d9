// Elements of a dense bf16 tensor, two to a word, the first in the low half: the high halves of f32 elements.
//
// gives: element_bits, element
// binds: 1 rows

@group(0) @binding(1) var<storage, read> rows: array<u32>;

fn element_bits(index: u32) -> u32 {
    return (rows[index / 2u] >> (16u * (index % 2u))) << 16u;
}

fn element(index: u32) -> f32 {
    return bitcast<f32>(element_bits(index));
}
