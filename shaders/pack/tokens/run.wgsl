// Tokens of a span that are consecutive in the dense tensor, starting at `call.first_token`.
//
// needs: call
// gives: token_of

fn token_of(token: u32, kv_head: u32) -> u32 {
    return call.first_token + token;
}
