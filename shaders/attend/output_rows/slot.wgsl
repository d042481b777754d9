// Slot `output_rows`: the places of output rows.
//
// Every choice has
//   fn output_at(index: u32) -> u32
//     where vector `index` of four elements lies, in such vectors from the start of the binding, if rows are numbered
//     one after the other
//
// gives: output_at

fn output_at(index: u32) -> u32 {
    return index;
}
