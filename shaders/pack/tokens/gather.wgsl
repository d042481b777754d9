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
