// Slot `output`: the type of the attention output.
//
// Every choice has
//   fn write_output(index: u32, x: vec4<f32>)
//     elements 4 · index onwards
