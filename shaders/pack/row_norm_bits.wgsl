// The norm of the row in workgroup memory as 16 bits. Every invocation must call, and each gets the result.
//
// needs: HEAD_DIM, channel_value, rounded
// gives: row_squares, row_norm_bits, row_sum_of_squares

// import pack/norm.wgsl

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
