// Slot `norms`: the norm that codes of levels are relative to.
//
// Every choice has
//   fn stored_norm(place: Place, kv_head: u32, token: u32) -> f32
//     of a token, which counts from the first of the page

// -------- of_tile --------

// Norms in the ranges of each tile: one word per token, whose low half is the norm.
//
// needs: Place, call
// gives: stored_norm
// binds: 3 ranges

// import pack/half.wgsl#conversions

@group(0) @binding(3) var<storage, read> ranges: array<u32>;

fn stored_norm(place: Place, kv_head: u32, token: u32) -> f32 {
    return half_value(ranges[(place.page * call.kv_heads + kv_head) * call.ranges_per_tile + token]);
}
