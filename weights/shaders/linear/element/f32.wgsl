// Single activations in f32.

@group(0) @binding(2) var<storage, read> inputs: array<f32>;

fn element(index: u32) -> f32 {
    return inputs[index];
}
