// Queries that are parts of longer rows, such as those of a fused projection.
//
// gives: input_at
// set by plans: INPUT_FIRST, INPUT_ROW, INPUT_STRIDE

// In vectors of four elements: what lies before the first row, a row, and from one row to the next.
const INPUT_FIRST: u32 = 0u;
const INPUT_ROW: u32 = 32u;
const INPUT_STRIDE: u32 = 32u;

fn input_at(index: u32) -> u32 {
    return INPUT_FIRST + index / INPUT_ROW * INPUT_STRIDE + index % INPUT_ROW;
}
