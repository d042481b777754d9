// Slot `sketch_fields`: four fields of keys with sketches at the bottom of their bytes. Higher bits are ignored.
//
// Every choice has
//   const KEY_QUADS: u32
//     sets of four field groups in a vector
//   fn key_fields(words: KeyVector, quad: u32, f: u32) -> u32
//     in the order of use, as in key_bytes/slot.wgsl
