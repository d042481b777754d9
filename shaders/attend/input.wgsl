// Slot `input`: the type of the queries.
//
// Every choice has
//   fn input4(index: u32) -> vec4<f32>
//     elements 4 · index onwards, NaN in place of infinities

// -------- bf16 --------

// A dense bf16 tensor, read four elements at a time: they are the high halves of f32 elements.
//
// gives: input4
// binds: 2 inputs

// import input_rows = attend/input_rows.wgsl
// import common/ordered.wgsl#infinities

@group(0) @binding(2) var<storage, read> inputs: array<vec2<u32>>;

fn input4(index: u32) -> vec4<f32> {
    let words = inputs[min(input_at(index), arrayLength(&inputs) - 1u)];
    let bits = vec4<u32>(words.x << 16u, words.x & 0xffff0000u, words.y << 16u, words.y & 0xffff0000u);
    return without_infinities(bitcast<vec4<f32>>(bits));
}

// -------- f16 --------

// A dense f16 tensor, read four elements at a time.
//
// gives: input4
// binds: 2 inputs

// import input_rows = attend/input_rows.wgsl
// import common/ordered.wgsl#infinities

@group(0) @binding(2) var<storage, read> inputs: array<vec2<u32>>;

fn input4(index: u32) -> vec4<f32> {
    let words = inputs[min(input_at(index), arrayLength(&inputs) - 1u)];
    return without_infinities(vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)));
}

// -------- f32 --------

// A dense f32 tensor, read four elements at a time.
//
// gives: input4
// binds: 2 inputs

// import input_rows = attend/input_rows.wgsl
// import common/ordered.wgsl#infinities

@group(0) @binding(2) var<storage, read> inputs: array<vec4<f32>>;

fn input4(index: u32) -> vec4<f32> {
    return without_infinities(inputs[min(input_at(index), arrayLength(&inputs) - 1u)]);
}
