// Outputs in f16, two to a word. OUTPUTS is even, so that rows begin at words.

@group(0) @binding(3) var<storage, read_write> outputs_of_rows: array<u32>;

fn store(row: u32, first: u32, sums: vec4<f32>) {
    if (first < OUTPUTS) {
        outputs_of_rows[(row * OUTPUTS + first) / 2u] = pack2x16float(sums.xy);
    }
    if (first + 2u < OUTPUTS) {
        outputs_of_rows[(row * OUTPUTS + first) / 2u + 1u] = pack2x16float(sums.zw);
    }
}

// Rows of the outputs that are bound.
fn bound_rows() -> u32 {
    return arrayLength(&outputs_of_rows) * 2u / OUTPUTS;
}
