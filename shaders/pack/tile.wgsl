// Tiles: the layout of `format::tile`.

// -------- places --------

// The places of elements in a tile.
//
// A tile consists of runs of words: a token's row for keys, a channel's column for values. BITS 16 is f16.
//
// needs: TILE_TOKENS, call
// gives: BITS, FIELD_MASK, run_word, fields_of, field_of, place_of, top_place_of
// set by plans: BITS, KEYS

const BITS: u32 = 4u;
const KEYS: u32 = 1u;

// Fields of one word, bit planes of a byte lane (unused in f16), and the mask of a field. 3-bit codes lie in vectors of
// three words: two hold the low pairs of bits, one holds the top bits.
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

// Word of the tile that is word `word` of a run.
fn tile_word(run: u32, word: u32) -> u32 {
    return (word / call.vector * runs() + run) * call.vector + word % call.vector;
}

// A part of a field: the bits of `mask`, starting at bit `low` of the field, lie at `shift` of the word.
struct Field {
    token: u32,
    channel: u32,
    shift: u32,
    low: u32,
    mask: u32,
}

// Number of fields that word `word` of a run holds parts of.
fn fields_of(word: u32) -> u32 {
    if (BITS == 3u) {
        return select(16u, 32u, word % 3u == 2u);
    }
    return FIELDS;
}

// The element in field `i` of a word of a run. Channels of a padded row lie beyond the head.
fn field_of(at: vec2<u32>, i: u32) -> Field {
    var group: u32;
    var lane = i % 4u;
    var shift: u32;
    var low = 0u;
    var mask = FIELD_MASK;
    if (BITS == 16u) {
        group = at.y / 2u;
        lane = at.y % 2u * 2u + i;
        shift = 16u * i;
    } else if (BITS == 3u) {
        let top = at.y % 3u == 2u;
        group = at.y / 3u * 8u + select(at.y % 3u * 4u, 0u, top) + i / 4u;
        shift = 8u * lane + select(2u, 1u, top) * (i / 4u);
        low = select(0u, 2u, top);
        mask = select(3u, 1u, top);
    } else {
        group = at.y * PLANES + i / 4u;
        shift = 8u * lane + BITS * (i / 4u);
    }
    if (KEYS == 1u) {
        return Field(at.x, 4u * group + lane, shift, low, mask);
    }
    return Field(group + 32u * lane, at.x, shift, low, mask);
}

// Byte lane, field group and run of an element.
fn element_place(token: u32, channel: u32) -> vec3<u32> {
    if (KEYS == 1u) {
        return vec3<u32>(channel % 4u, channel / 4u, token);
    }
    return vec3<u32>(token / 32u, token % 32u, channel);
}

// Word of the tile and shift of the field that hold an element, or the low pair of its three bits.
fn place_of(token: u32, channel: u32) -> vec2<u32> {
    let at = element_place(token, channel);
    if (BITS == 16u) {
        return vec2<u32>(tile_word(at.z, at.y * 2u + at.x / 2u), 16u * (at.x % 2u));
    }
    if (BITS == 3u) {
        return vec2<u32>(tile_word(at.z, at.y / 8u * 3u + at.y % 8u / 4u), 8u * at.x + 2u * (at.y % 4u));
    }
    return vec2<u32>(tile_word(at.z, at.y / max(PLANES, 1u)), 8u * at.x + BITS * (at.y % max(PLANES, 1u)));
}

// Word of the tile and shift of the top bit of a 3-bit element.
fn top_place_of(token: u32, channel: u32) -> vec2<u32> {
    let at = element_place(token, channel);
    return vec2<u32>(tile_word(at.z, at.y / 8u * 3u + 2u), 8u * at.x + at.y % 8u);
}

// -------- f16 --------

// The places of halves in a tile of f16.
//
// needs: TILE_TOKENS, call, half_to_single
// gives: f16_tile_words, f16_word, f16_bits

// Words of one load.
const F16_VECTOR: u32 = 4u;

fn f16_tile_words() -> u32 {
    return TILE_TOKENS / 2u * call.head_dim;
}

// Word of the tile that is word `word` of run `run`, of `runs` runs.
fn f16_word(run: u32, runs: u32, word: u32) -> u32 {
    return (word / F16_VECTOR * runs + run) * F16_VECTOR + word % F16_VECTOR;
}

// One half of a word as the bits of an f32.
fn f16_bits(word: u32, half: u32) -> u32 {
    return half_to_single((word >> (16u * half)) & 0xffffu);
}

// -------- grouping --------

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
