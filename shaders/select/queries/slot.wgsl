// Slot `queries`: the elements of a second dense tensor, next to `rows`.
//
// Every choice has
//   fn query_element(index: u32) -> f32
