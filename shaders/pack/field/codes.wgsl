// Fields of packed tiles: codes, stored signed.
//
// needs: BITS, Place
// gives: field_bits, field_value

// import pack/half.wgsl
// import pack/code_range.wgsl
// import ranges = pack/ranges/of_span.wgsl

const SIGN: u32 = 1u << (BITS - 1u);

fn field_bits(value: f32, place: Place, kv_head: u32, token: u32, channel: u32) -> u32 {
    return code_of(value, stored_range(place, kv_head, token, channel)) ^ SIGN;
}

fn field_value(field: u32, place: Place, kv_head: u32, token: u32, channel: u32) -> f32 {
    return value_of(field ^ SIGN, stored_range(place, kv_head, token, channel));
}
