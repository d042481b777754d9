// Slot `finite`: the value that is stored for an element.
//
// Every choice has
//   fn storable(bits: u32, place: Place, kv_head: u32, channel: u32) -> f32
//     the element of these bits, or what is stored in its place

// -------- centred --------

// Elements of keys that may be NaN, infinite or too large: these become zeros and set flags. The centre of the sequence
// is subtracted from every element. Its slot takes the place of the range slot (`places.wgsl#centred_tokens`).
//
// needs: HEAD_DIM, Place, call
// gives: storable
// binds: 7 centres

// import pack/half.wgsl#flagged

@group(0) @binding(7) var<storage, read> centres: array<f32>;

fn storable(bits: u32, place: Place, kv_head: u32, channel: u32) -> f32 {
    let centre = (place.range_slot * call.kv_heads + kv_head) * HEAD_DIM;
    return flagged_element(bits, place.token) - centres[centre + channel];
}

// -------- flagged --------

// Elements that may be NaN, infinite or too large: these become zeros and set flags.
//
// needs: Place
// gives: storable

// import pack/half.wgsl#flagged

fn storable(bits: u32, place: Place, kv_head: u32, channel: u32) -> f32 {
    return flagged_element(bits, place.token);
}

// -------- unchecked --------

// Elements that were checked before.
//
// needs: Place
// gives: storable

fn storable(bits: u32, place: Place, kv_head: u32, channel: u32) -> f32 {
    return bitcast<f32>(bits);
}
