// -------- bf16 --------

// Outputs in bf16, two to a word: f32 rounded to the nearest, ties to even. OUTPUTS is even, so that rows begin at
// words.

@group(0) @binding(3) var<storage, read_write> outputs_of_rows: array<u32>;

fn store(row: u32, first: u32, sums: vec4<f32>) {
    let bits = bitcast<vec4<u32>>(sums);
    let nearest = bits + 0x7FFFu + ((bits >> vec4<u32>(16u)) & vec4<u32>(1u));
    // Rounding would overflow the largest NaNs.
    let is_nan = (bits & vec4<u32>(0x7FFFFFFFu)) > vec4<u32>(0x7F800000u);
    let words = select(nearest, bits | vec4<u32>(0x400000u), is_nan) >> vec4<u32>(16u);
    if (first < OUTPUTS) {
        outputs_of_rows[(row * OUTPUTS + first) / 2u] = words.x | (words.y << 16u);
    }
    if (first + 2u < OUTPUTS) {
        outputs_of_rows[(row * OUTPUTS + first) / 2u + 1u] = words.z | (words.w << 16u);
    }
}

// Rows of the outputs that are bound.
fn bound_rows() -> u32 {
    return arrayLength(&outputs_of_rows) * 2u / OUTPUTS;
}

// -------- f16 --------

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

// -------- f32 --------

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
