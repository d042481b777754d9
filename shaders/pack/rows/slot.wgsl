// Slot `rows`: the elements of a dense tensor.
//
// Every choice has
//   fn element(index: u32) -> f32
// A choice may have
//   fn element_bits(index: u32) -> u32
//     as a float's bits: compilers may assume that no float is NaN
