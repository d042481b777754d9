// -------- bf16 --------

// Activations in bf16, the high halves of f32.

// import linear/octet.wgsl

@group(0) @binding(2) var<storage, read> inputs: array<vec4<u32>>;

fn load_inputs(octet: u32) -> Octet {
    let words = inputs[octet];
    let even = bitcast<vec4<f32>>(words << vec4<u32>(16u));
    let odd = bitcast<vec4<f32>>(words & vec4<u32>(0xFFFF0000u));
    return Octet(vec4<f32>(even.x, odd.x, even.y, odd.y), vec4<f32>(even.z, odd.z, even.w, odd.w));
}

// -------- f16 --------

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

// -------- f32 --------

// Activations in f32.

// import linear/octet.wgsl

@group(0) @binding(2) var<storage, read> inputs: array<vec4<f32>>;

fn load_inputs(octet: u32) -> Octet {
    return Octet(inputs[2u * octet], inputs[2u * octet + 1u]);
}
