// Slot `three_bytes`: four fields of three bits as signed bytes, of keys and of values.
//
// Every choice has
//   const THREE_BYTE: f32
//     distance between the bytes of neighbouring codes
//   fn three_bytes(fields: u32) -> u32
//     of the lowest three bits of every byte; the others are 0

// -------- levels --------

// 3-bit codes of a codebook as signed bytes.
//
// gives: THREE_BYTE, three_bytes

// import attend/codes.wgsl#level_bytes

const THREE_BYTE: f32 = 1f;

fn three_bytes(fields: u32) -> u32 {
    return level_bytes(fields, 3u);
}

// -------- top --------

// 3-bit affine codes as signed bytes: fields shifted to the top of their bytes.
//
// gives: THREE_BYTE, three_bytes

const THREE_BYTE: f32 = 32f;

fn three_bytes(fields: u32) -> u32 {
    return fields << 5u;
}
