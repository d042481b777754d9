// 3-bit affine codes as signed bytes: fields shifted to the top of their bytes.
//
// gives: THREE_BYTE, three_bytes

const THREE_BYTE: f32 = 32f;

fn three_bytes(fields: u32) -> u32 {
    return fields << 5u;
}
