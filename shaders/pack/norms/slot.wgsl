// Slot `norms`: the norm that codes of levels are relative to.
//
// Every choice has
//   fn stored_norm(place: Place, kv_head: u32, token: u32) -> f32
//     of a token, which counts from the first of the page
