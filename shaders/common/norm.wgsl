// The stored norm of a row: `format::codebook::stored_norm`, bit for bit. Sums are made of four channels, then of all
// fours in order, each rounded as it stands.

fn square(x: f32) -> f32 {
    // Bits of 2^-50: smaller elements count as 0.
    return select(rounded(x * x), 0f, (bitcast<u32>(x) & 0x7fffffffu) < 0x26800000u);
}

fn sum_of_four(x: vec4<f32>) -> f32 {
    return rounded(rounded(square(x.x) + square(x.y)) + rounded(square(x.z) + square(x.w)));
}

// The half nearest to the root of a sum of squares, ties to even; the root decides nothing but where to look.
fn norm_bits(sum: f32) -> u32 {
    let estimate = half_bits(min(sqrt(sum), HALF_MAX));
    let odd = (estimate & 1u) == 1u;
    var half = estimate;
    if (estimate > 0u && (sum < midpoint_square(estimate - 1u) || (sum == midpoint_square(estimate - 1u) && odd))) {
        half = estimate - 1u;
    } else if (estimate < 0x7bffu && (sum > midpoint_square(estimate) || (sum == midpoint_square(estimate) && odd))) {
        half = estimate + 1u;
    }
    return select(half, 0u, half < 0x400u);
}

// The square of the midpoint between a half and the next: exact.
fn midpoint_square(half: u32) -> f32 {
    let middle = (half_value(half) + half_value(half + 1u)) * 0.5;
    return middle * middle;
}
