// Slot `input`: the type of the queries.
//
// Every choice has
//   fn input4(index: u32) -> vec4<f32>
//     elements 4 · index onwards
