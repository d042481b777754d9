// Slot `output`: the type of the attention output.
//
// Every choice has
//   fn write_output(index: u32, x: vec4<f32>)
//     elements 4 · index onwards

// -------- bf16 --------

// The output tensor in bf16: the high halves of f32 elements, rounded to the nearest, ties to even.
//
// gives: write_output
// binds: 8 outputs

// import output_rows = attend/output_rows.wgsl

@group(0) @binding(8) var<storage, read_write> outputs: array<vec2<u32>>;

fn write_output(index: u32, x: vec4<f32>) {
    let bits = bitcast<vec4<u32>>(x);
    let nearest = bits + 0x7fffu + ((bits >> vec4<u32>(16u)) & vec4<u32>(1u));
    // Rounding would overflow the largest NaNs.
    let is_nan = (bits & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u);
    let halves = select(nearest, bits | vec4<u32>(0x400000u), is_nan) >> vec4<u32>(16u);
    outputs[min(output_at(index), arrayLength(&outputs) - 1u)] = halves.xz | (halves.yw << vec2<u32>(16u));
}

// -------- f16 --------

// The output tensor in f16.
//
// gives: write_output
// binds: 8 outputs

// import output_rows = attend/output_rows.wgsl

@group(0) @binding(8) var<storage, read_write> outputs: array<vec2<u32>>;

fn write_output(index: u32, x: vec4<f32>) {
    outputs[min(output_at(index), arrayLength(&outputs) - 1u)] = vec2<u32>(pack2x16float(x.xy), pack2x16float(x.zw));
}

// -------- f32 --------

// The output tensor in f32.
//
// gives: write_output
// binds: 8 outputs

// import output_rows = attend/output_rows.wgsl

@group(0) @binding(8) var<storage, read_write> outputs: array<vec4<f32>>;

fn write_output(index: u32, x: vec4<f32>) {
    outputs[min(output_at(index), arrayLength(&outputs) - 1u)] = x;
}
