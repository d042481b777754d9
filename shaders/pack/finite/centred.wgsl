// Elements of keys that may be NaN, infinite or too large: these become zeros and set flags. The centre of the sequence
// is subtracted from every element. Its slot takes the place of the range slot (`places/centred_tokens.wgsl`).
//
// needs: HEAD_DIM, Place, call
// gives: storable
// binds: 7 centres

// import pack/flag_element.wgsl

@group(0) @binding(7) var<storage, read> centres: array<f32>;

fn storable(bits: u32, place: Place, kv_head: u32, channel: u32) -> f32 {
    let centre = (place.range_slot * call.kv_heads + kv_head) * HEAD_DIM;
    return flagged_element(bits, place.token) - centres[centre + channel];
}
