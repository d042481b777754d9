// A dense f16 tensor, read four elements at a time.
//
// gives: input4
// binds: 2 inputs

// import input_rows = attend/input_rows/slot.wgsl

@group(0) @binding(2) var<storage, read> inputs: array<vec2<u32>>;

fn input4(index: u32) -> vec4<f32> {
    let words = inputs[min(input_at(index), arrayLength(&inputs) - 1u)];
    return vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y));
}
