// Elements of the f32 rows that the kernel writes.
//
// needs: output
// gives: element

fn element(index: u32) -> f32 {
    return output[index];
}
