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
