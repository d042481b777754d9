// Signs of sketches, the top bits of fields, relative to the norm of what the levels leave. That norm is the high half
// of a token's word.
//
// needs: BITS, Place, call
// gives: field_value
// binds: 3 ranges
// set by plans: SKETCH_LEVEL

// import pack/half.wgsl

@group(0) @binding(3) var<storage, read> ranges: array<u32>;

const SKETCH_LEVEL: f32 = 0.11f;

fn field_value(field: u32, place: Place, kv_head: u32, token: u32, channel: u32) -> f32 {
    let norm = half_value(ranges[(place.page * call.kv_heads + kv_head) * call.ranges_per_tile + token] >> 16u);
    return norm * select(SKETCH_LEVEL, -SKETCH_LEVEL, (field >> (BITS - 1u)) == 1u);
}
