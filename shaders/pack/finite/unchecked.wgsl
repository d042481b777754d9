// Elements that were found in order before.
//
// gives: storable

fn storable(bits: u32, token: u32) -> f32 {
    return bitcast<f32>(bits);
}
