// Elements of a dense f16 tensor, two to a word, the first in the low half.
//
// gives: element_bits, element
// binds: 1 rows

// import pack/half.wgsl

@group(0) @binding(1) var<storage, read> rows: array<u32>;

fn element_bits(index: u32) -> u32 {
    return half_to_single((rows[index / 2u] >> (16u * (index % 2u))) & 0xffffu);
}

fn element(index: u32) -> f32 {
    return bitcast<f32>(element_bits(index));
}
