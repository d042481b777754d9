// Slot `three_bytes`: four fields of three bits as signed bytes, of keys and of values.
//
// Every choice has
//   const THREE_BYTE: f32
//     distance between the bytes of neighbouring codes
//   fn three_bytes(fields: u32) -> u32
//     of the lowest three bits of every byte; the others are 0
