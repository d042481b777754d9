// The elements of a tile that share a range: `format::Grouping`. 1 is a channel over consecutive tokens, 2 is a token,
// 3 is a token over consecutive channels.
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
