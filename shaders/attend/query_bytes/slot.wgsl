// Slot `query_bytes`: the memory of the bytes that a step multiplies with keys that have ranges of groups, and when
// those of the next step are computed. Every choice calls `make_query_bytes` either from `prepare_keys` or from
// `prepare_keys_late` (attend/scores/slot.wgsl).
//
// Every choice has
//   fn put_query_word(vector: u32, word: u32, bytes: u32)
//     one of the four words of one of STEP_QUERY_VECTORS vectors
//   fn query_vector(vector: u32) -> vec4<u32>
//     all four
