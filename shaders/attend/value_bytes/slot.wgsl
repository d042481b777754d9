// Slot `value_bytes`: four tokens of a channel of packed values as signed bytes, for integer dot products.
//
// Every choice has
//   alias ValueVector
//     what one load takes of a channel's column
//   const VALUE_VECTORS: u32
//     vectors of a column of a tile
//   const VALUE_QUADS: u32
//     sets of four field groups in a vector
//   const VALUE_BYTE: f32
//     distance between the bytes of neighbouring codes
//   fn value_bytes(words: ValueVector, quad: u32, f: u32) -> u32
//     field group `f` of set `quad` of a vector, in the order of use
//   fn value_place(group: u32) -> vec2<u32>
//     the set, counted over the tile, and the place in it of field group `group`: tokens group, group + 32, ...
//
// needs: ValueVector, value_bytes
// gives: unsigned_words, unsigned_bytes

// The same bytes plus 128. `unsigned_bytes` extracts them from the result of `unsigned_words` for a vector.
fn unsigned_words(words: ValueVector) -> ValueVector {
    return words;
}

fn unsigned_bytes(words: ValueVector, quad: u32, f: u32) -> u32 {
    return value_bytes(words, quad, f) ^ 0x80808080u;
}
