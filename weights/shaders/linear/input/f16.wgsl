// Activations in f16.

// import linear/octet.wgsl

@group(0) @binding(2) var<storage, read> inputs: array<vec4<u32>>;

fn load_inputs(octet: u32) -> Octet {
    let words = inputs[octet];
    return Octet(
        vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)),
        vec4<f32>(unpack2x16float(words.z), unpack2x16float(words.w)),
    );
}
