// Slot `finite`: the value that is stored for an element.
//
// Every choice has
//   fn storable(bits: u32, place: Place, kv_head: u32, channel: u32) -> f32
//     the element of these bits, or what is stored in its place
