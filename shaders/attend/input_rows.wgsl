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

// -------- strided --------

// Queries that are parts of longer rows, such as those of a fused projection.
//
// gives: input_at
// set by plans: INPUT_FIRST, INPUT_ROW, INPUT_STRIDE

// Sizes in vectors of four elements: the offset of the first row, a row, and the distance between rows.
const INPUT_FIRST: u32 = 0u;
const INPUT_ROW: u32 = 32u;
const INPUT_STRIDE: u32 = 32u;

fn input_at(index: u32) -> u32 {
    return INPUT_FIRST + index / INPUT_ROW * INPUT_STRIDE + index % INPUT_ROW;
}
