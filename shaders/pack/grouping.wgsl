// Which elements of a tile share a range: `format::Grouping`. 1 is a channel and a run of tokens, 2 a token, 3 a token
// and a run of channels.
//
// needs: TILE_TOKENS, call
// gives: GROUPING, range_index
// set by plans: GROUPING

const GROUPING: u32 = 1u;

fn range_index(token: u32, channel: u32) -> u32 {
    if (GROUPING == 1u) {
        return token / call.group * call.head_dim + channel;
    }
    if (GROUPING == 2u) {
        return token;
    }
    return channel / call.group * TILE_TOKENS + token;
}
