// Elements that were checked before.
//
// needs: Place
// gives: storable

fn storable(bits: u32, place: Place, kv_head: u32, channel: u32) -> f32 {
    return bitcast<f32>(bits);
}
