// Outputs that are parts of longer rows, such as those of all ranks' heads.
//
// gives: output_at
// set by plans: OUTPUT_FIRST, OUTPUT_ROW, OUTPUT_STRIDE

// In vectors of four elements: what lies before the first row, a row, and from one row to the next.
const OUTPUT_FIRST: u32 = 0u;
const OUTPUT_ROW: u32 = 32u;
const OUTPUT_STRIDE: u32 = 32u;

fn output_at(index: u32) -> u32 {
    return OUTPUT_FIRST + index / OUTPUT_ROW * OUTPUT_STRIDE + index % OUTPUT_ROW;
}
