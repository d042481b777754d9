// Slot `mean`: the means that a dispatch computes.
//
// Every choice has
//   fn mean_count() -> u32
//   fn mean_at(index: u32) -> Mean
//     one of so many
