// Slot `key_bytes`: four channels of packed keys as signed bytes, for integer dot products.
//
// Every choice has
//   const KEY_QUADS: u32
//     sets of four field groups in a vector
//   fn key_bytes(words: KeyVector, quad: u32, f: u32) -> u32
//     field group `f` of set `quad` of a vector, in the order of use, which is that of attend/query_fields.wgsl
