// Slot `ranges`: the ranges of affine codes.
//
// Every choice has
//   fn stored_range(place: Place, kv_head: u32, token: u32, channel: u32) -> vec2<f32>
//     scale and minimum of an element; the token counts from the first of the page
