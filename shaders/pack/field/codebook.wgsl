// Fields of tiles of codebook codes, stored signed, and their norms.
//
// needs: Place
// gives: field_bits, field_value

// import level_fields = pack/level_fields/levels.wgsl
// import norms = pack/norms/of_tile.wgsl

fn field_bits(value: f32, place: Place, kv_head: u32, token: u32, channel: u32) -> u32 {
    return level_field(value, stored_norm(place, kv_head, token));
}

fn field_value(field: u32, place: Place, kv_head: u32, token: u32, channel: u32) -> f32 {
    return stored_norm(place, kv_head, token) * level_value(field);
}
