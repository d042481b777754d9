// Slot `rows`: the elements of a dense tensor.
//
// Every choice has
//   fn element(index: u32) -> f32
