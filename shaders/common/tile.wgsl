// Where elements lie in a tile: the layout of `format::tile`.
//
// A tile is made of runs of words: the row of a token for keys, the column of a channel for values. BITS 16 is f16.

const BITS: u32 = 4u;
const KEYS: u32 = 1u;

// Fields of one word, bit planes of a byte lane (unused in f16), and the field's mask.
const FIELDS: u32 = 32u / BITS;
const PLANES: u32 = 8u / BITS;
const FIELD_MASK: u32 = (1u << BITS) - 1u;

// Runs of one vector group of a tile.
fn runs() -> u32 {
    return select(call.head_dim, TILE_TOKENS, KEYS == 1u);
}

// Word `word` of a tile as (run, word of the run).
fn run_word(word: u32) -> vec2<u32> {
    let vector = word / call.vector;
    return vec2<u32>(vector % runs(), vector / runs() * call.vector + word % call.vector);
}

struct Field {
    token: u32,
    channel: u32,
    shift: u32,
}

// The element in field `i` of a word of a run. Channels of a padded row lie beyond the head.
fn field_of(at: vec2<u32>, i: u32) -> Field {
    var group: u32;
    var lane: u32;
    var shift: u32;
    if (BITS == 16u) {
        group = at.y / 2u;
        lane = at.y % 2u * 2u + i;
        shift = 16u * i;
    } else {
        group = at.y * PLANES + i / 4u;
        lane = i % 4u;
        shift = 8u * lane + BITS * (i / 4u);
    }
    if (KEYS == 1u) {
        return Field(at.x, 4u * group + lane, shift);
    }
    return Field(group + 32u * lane, at.x, shift);
}

// Word of the tile and shift of the field that hold an element.
fn place_of(token: u32, channel: u32) -> vec2<u32> {
    let run = select(channel, token, KEYS == 1u);
    let group = select(token % 32u, channel / 4u, KEYS == 1u);
    let lane = select(token / 32u, channel % 4u, KEYS == 1u);
    var word: u32;
    var shift: u32;
    if (BITS == 16u) {
        word = group * 2u + lane / 2u;
        shift = 16u * (lane % 2u);
    } else {
        word = group / max(PLANES, 1u);
        shift = 8u * lane + BITS * (group % max(PLANES, 1u));
    }
    return vec2<u32>((word / call.vector * runs() + run) * call.vector + word % call.vector, shift);
}
