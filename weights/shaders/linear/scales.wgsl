// -------- half --------

// Scale and zero of a group in f16, in a word.

@group(0) @binding(1) var<storage, read> scales: array<u32>;

fn load_scale(group: u32) -> vec2<f32> {
    return unpack2x16float(scales[group]);
}

// -------- single --------

// Scale and zero of a group in f32.

@group(0) @binding(1) var<storage, read> scales: array<vec2<f32>>;

fn load_scale(group: u32) -> vec2<f32> {
    return scales[group];
}
