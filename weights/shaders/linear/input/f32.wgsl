// Activations in f32.

// import linear/octet.wgsl

@group(0) @binding(2) var<storage, read> inputs: array<vec4<f32>>;

fn load_inputs(octet: u32) -> Octet {
    return Octet(inputs[2u * octet], inputs[2u * octet + 1u]);
}
