// Maps floats to unsigned integers of the same order, so that atomics can compare them. 0 lies below every float.
//
// gives: ordered, from_ordered

fn ordered(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    return select(bits | 0x80000000u, ~bits, bits >= 0x80000000u);
}

fn from_ordered(bits: u32) -> f32 {
    return bitcast<f32>(select(~bits, bits ^ 0x80000000u, bits >= 0x80000000u));
}
