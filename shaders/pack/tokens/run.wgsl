// Tokens of a span that follow each other in the dense tensor, from `call.first_token` on.
//
// needs: call
// gives: token_of

fn token_of(token: u32, kv_head: u32) -> u32 {
    return call.first_token + token;
}
