// Norms of rows, and their bits.

// -------- norm --------

// The stored norm of a row: `format::codebook::stored_norm`, bit for bit. Squares are summed over four channels, then
// over all fours in order, with a rounding after each operation.
//
// needs: HALF_MAX, half_bits, half_value, rounded
// gives: sum_of_four, norm_bits, renormalized_bits

fn square(x: f32) -> f32 {
    // Bits of 2^-50: smaller elements count as 0.
    return select(rounded(x * x), 0f, (bitcast<u32>(x) & 0x7fffffffu) < 0x26800000u);
}

fn sum_of_four(x: vec4<f32>) -> f32 {
    return rounded(rounded(square(x.x) + square(x.y)) + rounded(square(x.z) + square(x.w)));
}

fn norm_bits(sum: f32) -> u32 {
    return nearest_root(sum, 1f);
}

// The norm divided by that of its levels, given the sum of their squares: `format::codebook::renormalized`.
fn renormalized_bits(norm: f32, sum: f32) -> u32 {
    return nearest_root(norm * norm, sum);
}

// The half nearest to the root of `sum / divisor`, ties to even. The inexact root only decides where to search.
fn nearest_root(sum: f32, divisor: f32) -> u32 {
    let estimate = half_bits(min(sqrt(sum / divisor), HALF_MAX));
    let odd = (estimate & 1u) == 1u;
    let below = rounded(midpoint_square(max(estimate, 1u) - 1u) * divisor);
    let above = rounded(midpoint_square(estimate) * divisor);
    var half = estimate;
    if (estimate > 0u && (sum < below || (sum == below && odd))) {
        half = estimate - 1u;
    } else if (estimate < 0x7bffu && (sum > above || (sum == above && odd))) {
        half = estimate + 1u;
    }
    // A subnormal half counts as the nearer of 0 and the smallest normal one.
    return select(half, select(0u, 0x400u, half >= 0x200u), half < 0x400u);
}

// The exact square of the midpoint between a half and the next one.
fn midpoint_square(half: u32) -> f32 {
    let middle = (half_value(half) + half_value(half + 1u)) * 0.5;
    return middle * middle;
}

// -------- row_norm_bits --------

// The norm of the row in workgroup memory as 16 bits. Every invocation must call, and each gets the result.
//
// needs: HEAD_DIM, channel_value, rounded
// gives: row_squares, row_norm_bits, row_sum_of_squares

// import pack/norm.wgsl#norm

var<workgroup> row_squares: array<f32, HEAD_DIM / 4u>;
var<workgroup> row_norm_word: u32;

fn row_norm_bits(invocation: u32) -> u32 {
    if (invocation < HEAD_DIM / 4u) {
        row_squares[invocation] = sum_of_four(vec4<f32>(
            channel_value(invocation * 4u),
            channel_value(invocation * 4u + 1u),
            channel_value(invocation * 4u + 2u),
            channel_value(invocation * 4u + 3u),
        ));
    }
    workgroupBarrier();
    if (invocation == 0u) {
        row_norm_word = norm_bits(row_sum_of_squares());
    }
    workgroupBarrier();
    return row_norm_word;
}

fn row_sum_of_squares() -> f32 {
    var sum = 0f;
    // unroll
    for (var i = 0u; i < HEAD_DIM / 4u; i++) {
        sum = rounded(sum + row_squares[i]);
    }
    return sum;
}
