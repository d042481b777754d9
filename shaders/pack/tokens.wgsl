// Slot `tokens`: the token of the dense tensor that a token of the span comes from.
//
// Every choice has
//   fn token_of(token: u32, kv_head: u32) -> u32
//     the token of the tensor, below `call`'s number of tokens of the tensor for every token of the span
//
// gives: has_token

// Whether the span has such a token.
fn has_token(token: u32) -> bool {
    return true;
}

// -------- gather --------

// Tokens of a span named by indices, separately for every KV head: [kv_head][index_stride], starting at
// `call.first_token`. Memory safety does not depend on the indices: one that is too large selects the last token.
//
// needs: call
// gives: token_of
// binds: 4 indices

@group(0) @binding(4) var<storage, read> indices: array<u32>;

fn token_of(token: u32, kv_head: u32) -> u32 {
    let at = kv_head * call.index_stride + min(call.first_token + token, call.index_stride - 1u);
    return min(indices[at], call.below - 1u);
}

// -------- run --------

// Tokens of a span that are consecutive in the dense tensor, starting at `call.first_token`.
//
// needs: call
// gives: token_of

fn token_of(token: u32, kv_head: u32) -> u32 {
    return call.first_token + token;
}

// -------- windows --------

// Tokens of full pages that a step packs, window by window: those of `places.wgsl#windows`.
//
// needs: TILE_TOKENS, call
// gives: token_of, has_token

// import pack/step_table.wgsl

fn token_of(token: u32, kv_head: u32) -> u32 {
    return entry_at(token / TILE_TOKENS).x * call.kv_heads * TILE_TOKENS + token % TILE_TOKENS;
}

fn has_token(token: u32) -> bool {
    return token / TILE_TOKENS < entry_count() && has_entry(token / TILE_TOKENS);
}
