// Elements of the f32 rows that the kernel writes.

fn element(index: u32) -> f32 {
    return output[index];
}
