// Slot `words`: the words of a tile that hold a token.
//
// Every choice has
//   fn store_row(place: Place, kv_head: u32, exists: bool, invocation: u32)
//     stores the row in workgroup memory, or zeros if there is no such token
