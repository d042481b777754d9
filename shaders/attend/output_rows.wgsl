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

// -------- strided --------

// Outputs that are parts of longer rows, such as those of all ranks' heads.
//
// gives: output_at
// set by plans: OUTPUT_FIRST, OUTPUT_ROW, OUTPUT_STRIDE

// Sizes in vectors of four elements: the offset of the first row, a row, and the distance between rows.
const OUTPUT_FIRST: u32 = 0u;
const OUTPUT_ROW: u32 = 32u;
const OUTPUT_STRIDE: u32 = 32u;

fn output_at(index: u32) -> u32 {
    return OUTPUT_FIRST + index / OUTPUT_ROW * OUTPUT_STRIDE + index % OUTPUT_ROW;
}
