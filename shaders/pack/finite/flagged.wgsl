// Elements that may be NaN, infinite or too large: these become zeros and set flags.
//
// needs: Place
// gives: storable

// import pack/flag_element.wgsl

fn storable(bits: u32, place: Place, kv_head: u32, channel: u32) -> f32 {
    return flagged_element(bits, place.token);
}
