// Slot `field`: decodes a field of a tile, and encodes a number as the bits of a field. `append` and `quantize` use the
// encoding, `dequantize` uses the decoding. Each takes a choice that has the function.
//
// A choice may have
//   fn field_bits(value: f32, place: Place, kv_head: u32, token: u32, channel: u32) -> u32
//   fn field_value(field: u32, place: Place, kv_head: u32, token: u32, channel: u32) -> f32
//     the token counts from the first of the page

// -------- codebook --------

// Fields of tiles of codebook codes, stored signed, and their norms.
//
// needs: Place
// gives: field_bits, field_value

// import level_fields = pack/level_fields.wgsl#levels
// import norms = pack/norms.wgsl#of_tile

fn field_bits(value: f32, place: Place, kv_head: u32, token: u32, channel: u32) -> u32 {
    return level_field(value, stored_norm(place, kv_head, token));
}

fn field_value(field: u32, place: Place, kv_head: u32, token: u32, channel: u32) -> f32 {
    return stored_norm(place, kv_head, token) * level_value(field);
}

// -------- codes --------

// Fields of packed tiles: codes, stored signed.
//
// needs: BITS, Place
// gives: field_bits, field_value

// import pack/half.wgsl#conversions
// import pack/code_range.wgsl
// import ranges = pack/ranges.wgsl#of_span

const SIGN: u32 = 1u << (BITS - 1u);

fn field_bits(value: f32, place: Place, kv_head: u32, token: u32, channel: u32) -> u32 {
    return code_of(value, stored_range(place, kv_head, token, channel)) ^ SIGN;
}

fn field_value(field: u32, place: Place, kv_head: u32, token: u32, channel: u32) -> f32 {
    return value_of(field ^ SIGN, stored_range(place, kv_head, token, channel));
}

// -------- f16 --------

// Fields of f16 tiles.
//
// needs: Place
// gives: field_bits, field_value

// import pack/half.wgsl#conversions

fn field_bits(value: f32, place: Place, kv_head: u32, token: u32, channel: u32) -> u32 {
    return half_bits(value);
}

fn field_value(field: u32, place: Place, kv_head: u32, token: u32, channel: u32) -> f32 {
    return half_value(field);
}

// -------- sketch --------

// Signs of sketches, the top bits of fields, relative to the norm of what the levels leave. That norm is the high half
// of a token's word.
//
// needs: BITS, Place, call
// gives: field_value
// binds: 3 ranges
// set by plans: SKETCH_LEVEL

// import pack/half.wgsl#conversions

@group(0) @binding(3) var<storage, read> ranges: array<u32>;

const SKETCH_LEVEL: f32 = 0.11f;

fn field_value(field: u32, place: Place, kv_head: u32, token: u32, channel: u32) -> f32 {
    let norm = half_value(ranges[(place.page * call.kv_heads + kv_head) * call.ranges_per_tile + token] >> 16u);
    return norm * select(SKETCH_LEVEL, -SKETCH_LEVEL, (field >> (BITS - 1u)) == 1u);
}
