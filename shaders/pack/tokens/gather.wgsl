// Tokens of a span that indices name, for every KV head its own: [kv_head][index_stride], from `call.first_token` on.
// What indices hold decides nothing about memory: one that is too large stands for the last token.
//
// needs: call
// gives: token_of
// binds: 4 indices

@group(0) @binding(4) var<storage, read> indices: array<u32>;

fn token_of(token: u32, kv_head: u32) -> u32 {
    let at = kv_head * call.index_stride + min(call.first_token + token, call.index_stride - 1u);
    return min(indices[at], call.below - 1u);
}
