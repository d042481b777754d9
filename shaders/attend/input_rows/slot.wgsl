// Slot `input_rows`: the places of query rows.
//
// Every choice has
//   fn input_at(index: u32) -> u32
//     where vector `index` of four elements lies, in such vectors from the start of the binding, if rows are numbered
//     one after the other
//
// gives: input_at

fn input_at(index: u32) -> u32 {
    return index;
}
