// Half precision, in which tokens and ranges are stored.

// -------- conversions --------

// IEEE half precision by integer operations, because pack2x16float and unpack2x16float may round or flush as they like.
//
// gives: HALF_MAX, half_value, half_to_single, half_bits

const HALF_MAX: f32 = 65504f;

// The single-precision number that the low 16 bits of `half` hold.
fn half_value(half: u32) -> f32 {
    return bitcast<f32>(half_to_single(half & 0xffffu));
}

fn half_to_single(half: u32) -> u32 {
    let sign = (half & 0x8000u) << 16u;
    let exponent = (half >> 10u) & 31u;
    let mantissa = half & 0x3ffu;
    if (exponent == 0u) {
        // A subnormal is an exact multiple of 2^-24, and normal in single precision.
        return sign | bitcast<u32>(f32(mantissa) * 5.9604645e-8f);
    }
    if (exponent == 31u) {
        return sign | 0x7f800000u | (mantissa << 13u);
    }
    return sign | ((exponent + 112u) << 23u) | (mantissa << 13u);
}

// The nearest half to a finite number, ties to even, as 16 bits.
fn half_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x47800000u) {
        return sign | 0x7c00u;
    }
    if (magnitude >= 0x38800000u) {
        let rebiased = magnitude - 0x38000000u;
        return sign | ((rebiased + 0xfffu + ((rebiased >> 13u) & 1u)) >> 13u);
    }
    let shift = 126u - (magnitude >> 23u);
    if (shift > 24u) {
        return sign;
    }
    let mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    let quotient = mantissa >> shift;
    let remainder = mantissa - (quotient << shift);
    let middle = 1u << (shift - 1u);
    let up = remainder > middle || (remainder == middle && (quotient & 1u) == 1u);
    return sign | (quotient + u32(up));
}

// -------- flagged --------

// Elements that may be NaN, infinite or too large: these count as 0, and the first token with one is flagged. They are
// compared as integers, since compilers may assume that no float is NaN.
//
// needs: call
// gives: flagged_element
// binds: 5 flag

@group(0) @binding(5) var<storage, read_write> flag: atomic<u32>;

fn flagged_element(bits: u32, token: u32) -> f32 {
    if ((bits & 0x7fffffffu) > bitcast<u32>(call.largest)) {
        atomicMin(&flag, token);
        return 0f;
    }
    return bitcast<f32>(bits);
}
