// The output tensor in f32.
//
// gives: write_output
// binds: 8 outputs

// import output_rows = attend/output_rows/slot.wgsl

@group(0) @binding(8) var<storage, read_write> outputs: array<vec4<f32>>;

fn write_output(index: u32, x: vec4<f32>) {
    outputs[min(output_at(index), arrayLength(&outputs) - 1u)] = x;
}
