// The order of floats, and those that are not finite.

// -------- ordered --------

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

// -------- larger --------

// The larger of two numbers, or NaN if one is: `max` may drop NaN.
//
// gives: is_nan, larger

fn is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}

fn larger(a: f32, b: f32) -> f32 {
    return select(a, b, b > a || is_nan(b));
}

// -------- infinities --------

// NaN in place of infinities. All scores of an infinite query may be minus infinity, as if it saw no token.
//
// gives: without_infinities

fn without_infinities(x: vec4<f32>) -> vec4<f32> {
    let bits = bitcast<vec4<u32>>(x);
    let exponent = vec4<u32>(0x7f800000u);
    return bitcast<vec4<f32>>(select(bits, bits | vec4<u32>(0x00400000u), (bits & exponent) == exponent));
}
