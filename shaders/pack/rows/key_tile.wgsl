// Keys in f16 tiles, read as rows. Indices count as in [page][kv_head][token][channel]; the layout is that of
// `format::tile`.
//
// needs: TILE_TOKENS, call
// gives: element_bits, element
// binds: 1 rows

// import pack/half.wgsl
// import pack/f16_tile.wgsl

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
