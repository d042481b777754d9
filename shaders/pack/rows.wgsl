// Slot `rows`: the elements of a dense tensor.
//
// Every choice has
//   fn element(index: u32) -> f32
// A choice may have
//   fn element_bits(index: u32) -> u32
//     as a float's bits: compilers may assume that no float is NaN

// -------- bf16 --------

// Elements of a dense bf16 tensor, two to a word, the first in the low half: the high halves of f32 elements.
//
// gives: element_bits, element
// binds: 1 rows

@group(0) @binding(1) var<storage, read> rows: array<u32>;

fn element_bits(index: u32) -> u32 {
    return (rows[index / 2u] >> (16u * (index % 2u))) << 16u;
}

fn element(index: u32) -> f32 {
    return bitcast<f32>(element_bits(index));
}

// -------- f16 --------

// Elements of a dense f16 tensor, two to a word, the first in the low half.
//
// gives: element_bits, element
// binds: 1 rows

// import pack/half.wgsl#conversions

@group(0) @binding(1) var<storage, read> rows: array<u32>;

fn element_bits(index: u32) -> u32 {
    return half_to_single((rows[index / 2u] >> (16u * (index % 2u))) & 0xffffu);
}

fn element(index: u32) -> f32 {
    return bitcast<f32>(element_bits(index));
}

// -------- f32 --------

// Elements of a dense f32 tensor.
//
// gives: element_bits, element
// binds: 1 rows

@group(0) @binding(1) var<storage, read> rows: array<u32>;

fn element_bits(index: u32) -> u32 {
    return rows[index];
}

fn element(index: u32) -> f32 {
    return bitcast<f32>(rows[index]);
}

// -------- in_place --------

// Elements of the f32 rows that the kernel writes.
//
// needs: output
// gives: element

fn element(index: u32) -> f32 {
    return output[index];
}

// -------- key_tile --------

// Keys in f16 tiles, read as rows. Indices count as in [page][kv_head][token][channel]; the layout is that of
// `format::tile`.
//
// needs: TILE_TOKENS, call
// gives: element_bits, element
// binds: 1 rows

// import pack/half.wgsl#conversions
// import pack/tile.wgsl#f16

@group(0) @binding(1) var<storage, read> rows: array<u32>;

fn element_bits(index: u32) -> u32 {
    let token = index / call.head_dim % TILE_TOKENS;
    let channel = index % call.head_dim;
    let tile = index / call.head_dim / TILE_TOKENS;
    return f16_bits(rows[tile * f16_tile_words() + f16_word(token, TILE_TOKENS, channel / 2u)], channel % 2u);
}

fn element(index: u32) -> f32 {
    return bitcast<f32>(element_bits(index));
}

// -------- value_tile --------

// Values in f16 tiles, read as rows. Indices count as in [page][kv_head][token][channel]; the layout is that of
// `format::tile`.
//
// needs: TILE_TOKENS, call
// gives: element_bits, element
// binds: 1 rows

// import pack/half.wgsl#conversions
// import pack/tile.wgsl#f16

@group(0) @binding(1) var<storage, read> rows: array<u32>;

fn element_bits(index: u32) -> u32 {
    let token = index / call.head_dim % TILE_TOKENS;
    let tile = index / call.head_dim / TILE_TOKENS;
    // A group of two words holds four tokens: t, t + 32, t + 64, t + 96.
    let lane = token / 32u;
    let word = f16_word(index % call.head_dim, call.head_dim, token % 32u * 2u + lane / 2u);
    return f16_bits(rows[tile * f16_tile_words() + word], lane % 2u);
}

fn element(index: u32) -> f32 {
    return bitcast<f32>(element_bits(index));
}
