// 3-bit codes of a codebook as signed bytes.
//
// gives: THREE_BYTE, three_bytes

// import attend/level_bytes.wgsl

const THREE_BYTE: f32 = 1f;

fn three_bytes(fields: u32) -> u32 {
    return level_bytes(fields, 3u);
}
