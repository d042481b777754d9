// -------- bf16 --------

// Single activations in bf16, two to a word.

@group(0) @binding(2) var<storage, read> inputs: array<u32>;

fn element(index: u32) -> f32 {
    return bitcast<f32>((inputs[index / 2u] >> (16u * (index % 2u))) << 16u);
}

// -------- f16 --------

// Single activations in f16, two to a word.

@group(0) @binding(2) var<storage, read> inputs: array<u32>;

fn element(index: u32) -> f32 {
    return unpack2x16float(inputs[index / 2u] >> (16u * (index % 2u))).x;
}

// -------- f32 --------

// Single activations in f32.

@group(0) @binding(2) var<storage, read> inputs: array<f32>;

fn element(index: u32) -> f32 {
    return inputs[index];
}
