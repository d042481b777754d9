// Norms, codes and signs of a single row with a sketch: `format::sketch`, bit for bit. First comes the row's norm, then
// the codes and their residual, which is rotated once more for its norm and its signs.
//
// needs: BITS, HEAD_DIM, INVOCATIONS, Place, call, rounded
// gives: field_bits, store_row_ranges
// binds: 3 ranges

// import pack/half.wgsl
// import pack/row_norm_bits.wgsl
// import level_fields = pack/level_fields/levels.wgsl
// import common/sketch_row.wgsl

@group(0) @binding(3) var<storage, read_write> ranges: array<u32>;

const SIGN: u32 = 1u << (BITS - 1u);

var<workgroup> row_fields: array<u32, HEAD_DIM>;

fn field_bits(value: f32, place: Place, kv_head: u32, token: u32, channel: u32) -> u32 {
    return row_fields[channel];
}

fn store_row_ranges(place: Place, kv_head: u32, invocation: u32) {
    let norm = row_norm_bits(invocation);
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        let field = level_field(rotated[channel], half_value(norm));
        row_fields[channel] = field;
        rotated[channel] = rounded(rotated[channel] - rounded(half_value(norm) * level_value(field)));
    }
    sketch_row(invocation);
    let residual = row_norm_bits(invocation);
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        row_fields[channel] |= select(0u, SIGN, rotated[channel] < 0f);
    }
    if (invocation == 0u) {
        let tile = place.page * call.kv_heads + kv_head;
        ranges[tile * call.ranges_per_tile + place.slot] = norm | (residual << 16u);
    }
    workgroupBarrier();
}
