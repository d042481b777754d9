// Slot `query_bytes`: where the bytes lie that a step multiplies keys with ranges of groups with, and when those of the
// next step are made: every choice calls `make_query_bytes` either from `prepare_keys` or from `prepare_keys_late`
// (attend/scores/slot.wgsl).
//
// Every choice has
//   fn put_query_word(vector: u32, word: u32, bytes: u32)
//     one of the four words of one of STEP_QUERY_VECTORS vectors
//   fn query_vector(vector: u32) -> vec4<u32>
//     all four
