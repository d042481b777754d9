// The output tensor in f16.
//
// gives: write_output
// binds: 8 outputs

// import output_rows = attend/output_rows/slot.wgsl

@group(0) @binding(8) var<storage, read_write> outputs: array<vec2<u32>>;

fn write_output(index: u32, x: vec4<f32>) {
    outputs[min(output_at(index), arrayLength(&outputs) - 1u)] = vec2<u32>(pack2x16float(x.xy), pack2x16float(x.zw));
}
