// Slot `queries`: the elements of a second dense tensor, beside `rows`.
//
// Every choice has
//   fn query_element(index: u32) -> f32
