// Fields of f16 tiles.
//
// needs: Place
// gives: field_bits, field_value

// import pack/half.wgsl

fn field_bits(value: f32, place: Place, kv_head: u32, token: u32, channel: u32) -> u32 {
    return half_bits(value);
}

fn field_value(field: u32, place: Place, kv_head: u32, token: u32, channel: u32) -> f32 {
    return half_value(field);
}
