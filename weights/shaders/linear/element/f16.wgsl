// Single activations in f16, two to a word.

@group(0) @binding(2) var<storage, read> inputs: array<u32>;

fn element(index: u32) -> f32 {
    return unpack2x16float(inputs[index / 2u] >> (16u * (index % 2u))).x;
}
