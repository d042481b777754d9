// Ranges and codes: `format::CodeRange`, bit for bit. No bit depends on a division, or on a rounding that a compiler
// may change by fusing.
//
// needs: BITS, HALF_MAX, call, half_bits, half_value, rounded
// gives: code_range, range_word, range_of_word, code_of, value_of
// set by plans: SYMMETRIC

const MAX_CODE: u32 = (1u << BITS) - 1u;
// 1 where ranges are made about 0: of the largest magnitude, over one bit less, and the middle code is 0.
const SYMMETRIC: u32 = 0u;
const RANGE_BITS: u32 = BITS - SYMMETRIC;
const RANGE_STEPS: u32 = (1u << RANGE_BITS) - 1u;
const RANGE_MIDDLE: f32 = f32(1u << (BITS - 1u));
// Scales below 2^-100 count as 0.
const MIN_SCALE: f32 = 7.888609e-31f;

// The smallest normal half, 2^-14.
const SMALLEST_NORMAL: u32 = 0x400u;

// Numbers too small for single precision, and the negative zero, as zero.
fn flushed(x: f32) -> f32 {
    return select(x, 0.0, (bitcast<u32>(x) & 0x7fffffffu) < 0x00800000u);
}

fn shrunk(x: f32) -> f32 {
    return flushed(rounded(flushed(x) * call.shrink));
}

// (scale, minimum) of a group whose extremes are `low` and `high`.
fn code_range(low: f32, high: f32) -> vec2<f32> {
    let smallest = shrunk(low);
    let largest = shrunk(high);
    if (SYMMETRIC == 1u) {
        return about_zero(scale_of(max(abs(smallest), abs(largest))));
    }
    return vec2<f32>(scale_of(rounded(largest - smallest)), smallest);
}

fn about_zero(scale: f32) -> vec2<f32> {
    return vec2<f32>(scale, select(-RANGE_MIDDLE * scale, 0.0, scale == 0.0));
}

// spread / RANGE_STEPS, correctly rounded: the mantissa is divided as an integer.
fn scale_of(spread: f32) -> f32 {
    let bits = bitcast<u32>(spread);
    let exponent = bits >> 23u;
    // Covers zero, and scales far below the smallest that counts.
    if (spread <= 0.0 || exponent < 27u) {
        return 0.0;
    }
    let numerator = ((bits & 0x7fffffu) | 0x800000u) << RANGE_BITS;
    let quotient = numerator / RANGE_STEPS;
    let remainder = numerator - quotient * RANGE_STEPS;
    // The quotient has 24 or 25 bits.
    var mantissa = quotient;
    var up = 2u * remainder > RANGE_STEPS;
    var scale_exponent = exponent - RANGE_BITS;
    if (quotient >= 0x1000000u) {
        mantissa = quotient >> 1u;
        up = (quotient & 1u) == 1u && (remainder != 0u || (mantissa & 1u) == 1u);
        scale_exponent += 1u;
    }
    // A mantissa that rounds up to 2^24 carries into the exponent, as it should.
    let scale = bitcast<f32>((scale_exponent << 23u) + (mantissa - 0x800000u) + u32(up));
    return select(scale, 0.0, scale < MIN_SCALE);
}

// The range of a group whose extremes are `low` and `high` as tiles store it: scale and minimum rounded to half
// precision, the scale in the low half. A scale that is not 0 is a normal half, because readers may take a subnormal
// one for 0 (`format::CodeRange::rounded_to_f16`). A group that spans less than that is stored as its middle.
fn range_word(low: f32, high: f32) -> u32 {
    var range = code_range(low, high);
    let top = shrunk(high);
    if (SYMMETRIC == 0u && rounded(top - range.y) < half_value(SMALLEST_NORMAL)) {
        range = vec2<f32>(0.0, flushed(0.5 * flushed(rounded(range.y + top))));
    }
    let largest = select(HALF_MAX, HALF_MAX / RANGE_MIDDLE, SYMMETRIC == 1u);
    let scale = select(max(half_bits(min(range.x, largest)), SMALLEST_NORMAL), 0u, range.x == 0.0);
    let minimum = select(range.y, about_zero(half_value(scale)).y, SYMMETRIC == 1u);
    return scale | (half_bits(clamp(minimum, -HALF_MAX, HALF_MAX)) << 16u);
}

fn range_of_word(word: u32) -> vec2<f32> {
    return vec2<f32>(half_value(word), half_value(word >> 16u));
}

// The nearest code, ties to the even one: an estimate that is at most one off, then decided by comparing with the
// midpoints between levels.
fn code_of(value: f32, range: vec2<f32>) -> u32 {
    if (range.x == 0.0) {
        return 0u;
    }
    let distance = rounded(value - range.y);
    let estimate = clamp(floor(distance / range.x + 0.5), 0.0, f32(MAX_CODE));
    let code = u32(estimate);
    let below = rounded((estimate - 0.5) * range.x);
    let above = rounded((estimate + 0.5) * range.x);
    let odd = (code & 1u) == 1u;
    if (code > 0u && (distance < below || (distance == below && odd))) {
        return code - 1u;
    }
    if (code < MAX_CODE && (distance > above || (distance == above && odd))) {
        return code + 1u;
    }
    return code;
}

fn value_of(code: u32, range: vec2<f32>) -> f32 {
    return rounded(range.x * f32(code)) + range.y;
}
