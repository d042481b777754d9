// Outputs in f32.

@group(0) @binding(3) var<storage, read_write> outputs_of_rows: array<f32>;

fn store(row: u32, first: u32, sums: vec4<f32>) {
    // unroll
    for (var i = 0u; i < 4u; i++) {
        if (first + i < OUTPUTS) {
            outputs_of_rows[row * OUTPUTS + first + i] = sums[i];
        }
    }
}

// Rows of the outputs that are bound.
fn bound_rows() -> u32 {
    return arrayLength(&outputs_of_rows) * 1u / OUTPUTS;
}
