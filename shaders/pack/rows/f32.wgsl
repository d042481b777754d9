// Elements of a dense f32 tensor.
//
// gives: element_bits, element
// binds: 1 rows

@group(0) @binding(1) var<storage, read> rows: array<u32>;

fn element_bits(index: u32) -> u32 {
    return rows[index];
}

fn element(index: u32) -> f32 {
    return bitcast<f32>(rows[index]);
}
