// Fields of tiles of codebook codes, stored signed, and their norms: `format::Codebook`, bit for bit.

// import common/half.wgsl
// import common/levels.wgsl
// import norms = common/norms_of_tile.wgsl

const SIGN: u32 = 1u << (BITS - 1u);
// Levels above 0, and the boundaries above 0 between them.
const LEVELS: u32 = 8u;
const LEVELS_LOW: vec4<f32> = vec4<f32>(1f, 2f, 3f, 4f);
const LEVELS_HIGH: vec4<f32> = vec4<f32>(5f, 6f, 7f, 8f);
const BOUNDARIES_LOW: vec4<f32> = vec4<f32>(1.5f, 2.5f, 3.5f, 4.5f);
const BOUNDARIES_HIGH: vec4<f32> = vec4<f32>(5.5f, 6.5f, 7.5f, 0f);

// The nearest level's field; at a boundary that of the lower one.
fn field_bits(value: f32, place: Place, kv_head: u32, token: u32, channel: u32) -> u32 {
    let norm = stored_norm(place, kv_head, token);
    if (norm == 0f) {
        return SIGN;
    }
    let negative = !(value > 0f);
    let magnitude = abs(value);
    var index = 0u;
    // unroll
    for (var i = 0u; i < LEVELS - 1u; i++) {
        let boundary = rounded(norm * select(BOUNDARIES_HIGH[i % 4u], BOUNDARIES_LOW[i % 4u], i < 4u));
        index += u32(magnitude > boundary || (magnitude == boundary && negative));
    }
    return select(LEVELS + index, LEVELS - 1u - index, negative) ^ SIGN;
}

fn field_value(field: u32, place: Place, kv_head: u32, token: u32, channel: u32) -> f32 {
    return stored_norm(place, kv_head, token) * levels_of(vec4<u32>(field), BITS, LEVELS_LOW, LEVELS_HIGH).x;
}
