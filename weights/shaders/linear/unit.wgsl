// -------- given --------

// Rows of activations that were divided by a power of two each.

@group(0) @binding(4) var<storage, read> units: array<f32>;

fn unit(row: u32) -> f32 {
    return units[row];
}

// -------- one --------

// Rows of activations that are what they are.

fn unit(row: u32) -> f32 {
    return 1.0;
}
