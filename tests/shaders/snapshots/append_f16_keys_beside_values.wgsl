// ----------------------------------------------------------------------------------------------------
// shaders/pack/append.wgsl
// ----------------------------------------------------------------------------------------------------

// append: stores single tokens in pages of one shard, as f16 or as codes whose ranges belong to single tokens.
//
// One workgroup owns one token of one KV head. It reads the row, rotates it if the format does, computes and stores its
// ranges, and then writes its words. The words of a key belong to it alone; those of a value also hold other tokens.
// Tokens are read and keys are written coalesced; values are written in words 16 bytes apart. Keys of tokens beyond
// `tokens` are zero bits with a range of zero.
//
// In bounds: workgroups beyond the places · kv_heads return; pages, slots and the rows of the tokens read were checked
// against the buffers when they were bound, or when a step's table was made for the layout that they were bound to.
// Loops are bounded by HEAD_DIM; divisors are sizes of a checked shape.
//
// gives: INVOCATIONS, HEAD_DIM
// set by plans: HEAD_DIM

const INVOCATIONS: u32 = 64u;
const HEAD_DIM: u32 = 128u;

fn append(group: vec3<u32>, groups: vec3<u32>, invocation: u32) {
    let index = group.y * groups.x + group.x;
    if (index / call.kv_heads >= place_count() || !has_place(index / call.kv_heads)) {
        return;
    }
    let place = place_at(index / call.kv_heads);
    let kv_head = index % call.kv_heads;
    let start = row_start(place.token, kv_head);
    let exists = place.token < call.tokens;
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        var x = 0f;
        if (exists) {
            x = storable(element_bits(start + channel), place, kv_head, channel);
        }
        put_channel(channel, x);
    }
    finish_row(invocation);
    store_row_ranges(place, kv_head, invocation);
    store_row(place, kv_head, exists, invocation);
}

// Of pack/row_ranges.wgsl, by default:

// Called by all invocations once the row is in workgroup memory.
fn store_row_ranges(place: Place, kv_head: u32, invocation: u32) {}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/call.wgsl
// ----------------------------------------------------------------------------------------------------

// Arguments of the kernels that move rows of dense tensors into tiles and back.
//
// gives: Place, call, TILE_TOKENS, row_start, rounded
// binds: 0 call

struct Place {
    // First token, relative to the first of the span.
    token: u32,
    // The page within its shard.
    page: u32,
    // Slot of the token in the page, if the place is a single token's.
    slot: u32,
    // Range slot of the span that the page belongs to.
    range_slot: u32,
}

struct Call {
    // Index of the dense tensor's first element within its binding.
    first_element: u32,
    token_stride: u32,
    head_stride: u32,
    // First token of the span in the dense tensor.
    first_token: u32,
    // Tokens of the span.
    tokens: u32,
    kv_heads: u32,
    head_dim: u32,
    range_slot: u32,
    tile_words: u32,
    // Words of one load of a tile.
    vector: u32,
    // Tokens or channels that share a range.
    group: u32,
    ranges_per_tile: u32,
    // Number of invocations with work, or of rows, unless the places determine it.
    total: u32,
    shrink: f32,
    // 0, in a form that the compiler cannot know.
    zero: u32,
    place_count: u32,
    // Indices per KV head of gathered tokens, and their exclusive upper bound.
    index_stride: u32,
    below: u32,
    // The largest valid element, for kernels that check elements.
    largest: f32,
    // The section of a step's table that counts and lists the places, and the shards that this dispatch takes from it.
    section: u32,
    shards: u32,
    places: array<Place>,
}

@group(0) @binding(0) var<storage, read> call: Call;

const TILE_TOKENS: u32 = 128u;

// Index of a row's first element within the dense tensor's binding. Tokens are relative to the first of the span.
fn row_start(token: u32, kv_head: u32) -> u32 {
    return call.first_element + token_of(token, kv_head) * call.token_stride + kv_head * call.head_stride;
}

// `x` as rounded. Compilers may fuse a product with the sum that takes it, but not through this function.
fn rounded(x: f32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) ^ call.zero);
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/tokens.wgsl#run
// ----------------------------------------------------------------------------------------------------

// Tokens of a span that are consecutive in the dense tensor, starting at `call.first_token`.
//
// needs: call
// gives: token_of

fn token_of(token: u32, kv_head: u32) -> u32 {
    return call.first_token + token;
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/places.wgsl#tokens
// ----------------------------------------------------------------------------------------------------

// Tokens that a step stores.
//
// needs: Place
// gives: place_count, has_place, place_at

fn place_count() -> u32 {
    return entry_count();
}

fn has_place(index: u32) -> bool {
    return has_entry(index);
}

fn place_at(index: u32) -> Place {
    let entry = entry_at(index);
    return Place(entry.x, entry.y, entry.z, 0u);
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/step_table.wgsl
// ----------------------------------------------------------------------------------------------------

// A step's table: `plan::WriteTable`. A section holds the number of its entries, then the entries.
//
// needs: call
// gives: entry_count, entry_at, has_entry
// binds: 6 table

@group(0) @binding(6) var<storage, read> table: array<vec4<u32>>;

fn entry_count() -> u32 {
    return table[call.section].x;
}

fn entry_at(index: u32) -> vec4<u32> {
    return table[call.section + 1u + index];
}

// Whether an entry belongs to the shards of the dispatch.
fn has_entry(index: u32) -> bool {
    return entry_at(index).w == call.shards;
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/tile.wgsl#places
// ----------------------------------------------------------------------------------------------------

// The places of elements in a tile.
//
// A tile consists of runs of words: a token's row for keys, a channel's column for values. BITS 16 is f16.
//
// needs: TILE_TOKENS, call
// gives: BITS, FIELD_MASK, run_word, fields_of, field_of, place_of, top_place_of
// set by plans: BITS, KEYS

const BITS: u32 = 16u;
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

// ----------------------------------------------------------------------------------------------------
// shaders/pack/half.wgsl#conversions #flagged
// ----------------------------------------------------------------------------------------------------

// IEEE half precision by integer operations, because pack2x16float and unpack2x16float may round or flush as they like.
//
// gives: HALF_MAX, half_value, half_to_single, half_bits

const HALF_MAX: f32 = 65504f;

// The single-precision number that the low 16 bits of `half` hold.
fn half_value(half: u32) -> f32 {
    return bitcast<f32>(half_to_single(half & 0xffffu));
}

fn half_to_single(half: u32) -> u32 {
    let sign = (half & 0x8000u) << 16u;
    let exponent = (half >> 10u) & 31u;
    let mantissa = half & 0x3ffu;
    if (exponent == 0u) {
        // A subnormal is an exact multiple of 2^-24, and normal in single precision.
        return sign | bitcast<u32>(f32(mantissa) * 5.9604645e-8f);
    }
    if (exponent == 31u) {
        return sign | 0x7f800000u | (mantissa << 13u);
    }
    return sign | ((exponent + 112u) << 23u) | (mantissa << 13u);
}

// The nearest half to a finite number, ties to even, as 16 bits.
fn half_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x47800000u) {
        return sign | 0x7c00u;
    }
    if (magnitude >= 0x38800000u) {
        let rebiased = magnitude - 0x38000000u;
        return sign | ((rebiased + 0xfffu + ((rebiased >> 13u) & 1u)) >> 13u);
    }
    let shift = 126u - (magnitude >> 23u);
    if (shift > 24u) {
        return sign;
    }
    let mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    let quotient = mantissa >> shift;
    let remainder = mantissa - (quotient << shift);
    let middle = 1u << (shift - 1u);
    let up = remainder > middle || (remainder == middle && (quotient & 1u) == 1u);
    return sign | (quotient + u32(up));
}

// Elements that may be NaN, infinite or too large: these count as 0, and the first token with one is flagged. They are
// compared as integers, since compilers may assume that no float is NaN.
//
// needs: call
// gives: flagged_element
// binds: 5 flag

@group(0) @binding(5) var<storage, read_write> flag: atomic<u32>;

fn flagged_element(bits: u32, token: u32) -> f32 {
    if ((bits & 0x7fffffffu) > bitcast<u32>(call.largest)) {
        atomicMin(&flag, token);
        return 0f;
    }
    return bitcast<f32>(bits);
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/rows.wgsl#f16
// ----------------------------------------------------------------------------------------------------

// Elements of a dense f16 tensor, two to a word, the first in the low half.
//
// gives: element_bits, element
// binds: 1 rows

@group(0) @binding(1) var<storage, read> rows: array<u32>;

fn element_bits(index: u32) -> u32 {
    return half_to_single((rows[index / 2u] >> (16u * (index % 2u))) & 0xffffu);
}

fn element(index: u32) -> f32 {
    return bitcast<f32>(element_bits(index));
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/row.wgsl#plain
// ----------------------------------------------------------------------------------------------------

// A row in workgroup memory that is stored without rotation.
//
// needs: HEAD_DIM
// gives: put_channel, channel_value, finish_row

var<workgroup> row: array<f32, HEAD_DIM>;

fn put_channel(channel: u32, x: f32) {
    row[channel] = x;
}

fn channel_value(channel: u32) -> f32 {
    return row[channel];
}

fn finish_row(invocation: u32) {
    workgroupBarrier();
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/field.wgsl#f16
// ----------------------------------------------------------------------------------------------------

// Fields of f16 tiles.
//
// needs: Place
// gives: field_bits, field_value

fn field_bits(value: f32, place: Place, kv_head: u32, token: u32, channel: u32) -> u32 {
    return half_bits(value);
}

fn field_value(field: u32, place: Place, kv_head: u32, token: u32, channel: u32) -> f32 {
    return half_value(field);
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/finite.wgsl#flagged
// ----------------------------------------------------------------------------------------------------

// Elements that may be NaN, infinite or too large: these become zeros and set flags.
//
// needs: Place
// gives: storable

fn storable(bits: u32, place: Place, kv_head: u32, channel: u32) -> f32 {
    return flagged_element(bits, place.token);
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/words.wgsl#of_key
// ----------------------------------------------------------------------------------------------------

// The words of a key, which belong to it alone. An invocation codes some channels, then writes some words.
//
// needs: HEAD_DIM, INVOCATIONS, Place, TILE_TOKENS, call, channel_value, field_bits, field_of, fields_of
// gives: store_row
// binds: 2 tiles

@group(0) @binding(2) var<storage, read_write> tiles: array<u32>;

var<workgroup> row_bits: array<u32, HEAD_DIM>;

fn store_row(place: Place, kv_head: u32, exists: bool, invocation: u32) {
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        row_bits[channel] = field_bits(channel_value(channel), place, kv_head, place.slot, channel);
    }
    workgroupBarrier();
    let tile = (place.page * call.kv_heads + kv_head) * call.tile_words;
    for (var word = invocation; word < call.tile_words / TILE_TOKENS; word += INVOCATIONS) {
        let at = (word / call.vector * TILE_TOKENS + place.slot) * call.vector + word % call.vector;
        tiles[tile + at] = select(0u, key_word(place.slot, word), exists);
    }
}

fn key_word(slot: u32, word: u32) -> u32 {
    var packed = 0u;
    for (var i = 0u; i < fields_of(word); i++) {
        let field = field_of(vec2<u32>(slot, word), i);
        if (field.channel < HEAD_DIM) {
            packed |= ((row_bits[field.channel] >> field.low) & field.mask) << field.shift;
        }
    }
    return packed;
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/append.wgsl
// ----------------------------------------------------------------------------------------------------

// append: stores single tokens in pages of one shard, as f16 or as codes whose ranges belong to single tokens.
//
// One workgroup owns one token of one KV head. It reads the row, rotates it if the format does, computes and stores its
// ranges, and then writes its words. The words of a key belong to it alone; those of a value also hold other tokens.
// Tokens are read and keys are written coalesced; values are written in words 16 bytes apart. Keys of tokens beyond
// `tokens` are zero bits with a range of zero.
//
// In bounds: workgroups beyond the places · kv_heads return; pages, slots and the rows of the tokens read were checked
// against the buffers when they were bound, or when a step's table was made for the layout that they were bound to.
// Loops are bounded by HEAD_DIM; divisors are sizes of a checked shape.
//
// gives: INVOCATIONS, HEAD_DIM
// set by plans: HEAD_DIM

const other_INVOCATIONS: u32 = 64u;
const other_HEAD_DIM: u32 = 128u;

fn other_append(group: vec3<u32>, groups: vec3<u32>, invocation: u32) {
    let index = group.y * groups.x + group.x;
    if (index / other_call.kv_heads >= other_place_count() || !other_has_place(index / other_call.kv_heads)) {
        return;
    }
    let place = other_place_at(index / other_call.kv_heads);
    let kv_head = index % other_call.kv_heads;
    let start = other_row_start(place.token, kv_head);
    let exists = place.token < other_call.tokens;
    for (var channel = invocation; channel < other_HEAD_DIM; channel += other_INVOCATIONS) {
        var x = 0f;
        if (exists) {
            x = other_storable(other_element_bits(start + channel), place, kv_head, channel);
        }
        other_put_channel(channel, x);
    }
    other_finish_row(invocation);
    other_store_row_ranges(place, kv_head, invocation);
    other_store_row(place, kv_head, exists, invocation);
}

// Of pack/row_ranges.wgsl, by default:

// Called by all invocations once the row is in workgroup memory.
fn other_store_row_ranges(place: other_Place, kv_head: u32, invocation: u32) {}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/call.wgsl
// ----------------------------------------------------------------------------------------------------

// Arguments of the kernels that move rows of dense tensors into tiles and back.
//
// gives: Place, call, TILE_TOKENS, row_start, rounded
// binds: 0 call

struct other_Place {
    // First token, relative to the first of the span.
    token: u32,
    // The page within its shard.
    page: u32,
    // Slot of the token in the page, if the place is a single token's.
    slot: u32,
    // Range slot of the span that the page belongs to.
    range_slot: u32,
}

struct other_Call {
    // Index of the dense tensor's first element within its binding.
    first_element: u32,
    token_stride: u32,
    head_stride: u32,
    // First token of the span in the dense tensor.
    first_token: u32,
    // Tokens of the span.
    tokens: u32,
    kv_heads: u32,
    head_dim: u32,
    range_slot: u32,
    tile_words: u32,
    // Words of one load of a tile.
    vector: u32,
    // Tokens or channels that share a range.
    group: u32,
    ranges_per_tile: u32,
    // Number of invocations with work, or of rows, unless the places determine it.
    total: u32,
    shrink: f32,
    // 0, in a form that the compiler cannot know.
    zero: u32,
    other_place_count: u32,
    // Indices per KV head of gathered tokens, and their exclusive upper bound.
    index_stride: u32,
    below: u32,
    // The largest valid element, for kernels that check elements.
    largest: f32,
    // The section of a step's table that counts and lists the places, and the shards that this dispatch takes from it.
    section: u32,
    shards: u32,
    places: array<other_Place>,
}

@group(0) @binding(8) var<storage, read> other_call: other_Call;

const other_TILE_TOKENS: u32 = 128u;

// Index of a row's first element within the dense tensor's binding. Tokens are relative to the first of the span.
fn other_row_start(token: u32, kv_head: u32) -> u32 {
    return other_call.first_element + other_token_of(token, kv_head) * other_call.token_stride + kv_head * other_call.head_stride;
}

// `x` as rounded. Compilers may fuse a product with the sum that takes it, but not through this function.
fn other_rounded(x: f32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) ^ other_call.zero);
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/tokens.wgsl#run
// ----------------------------------------------------------------------------------------------------

// Tokens of a span that are consecutive in the dense tensor, starting at `call.first_token`.
//
// needs: call
// gives: token_of

fn other_token_of(token: u32, kv_head: u32) -> u32 {
    return other_call.first_token + token;
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/places.wgsl#tokens
// ----------------------------------------------------------------------------------------------------

// Tokens that a step stores.
//
// needs: Place
// gives: place_count, has_place, place_at

fn other_place_count() -> u32 {
    return other_entry_count();
}

fn other_has_place(index: u32) -> bool {
    return other_has_entry(index);
}

fn other_place_at(index: u32) -> other_Place {
    let entry = other_entry_at(index);
    return other_Place(entry.x, entry.y, entry.z, 0u);
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/step_table.wgsl
// ----------------------------------------------------------------------------------------------------

// A step's table: `plan::WriteTable`. A section holds the number of its entries, then the entries.
//
// needs: call
// gives: entry_count, entry_at, has_entry
// binds: 6 table


fn other_entry_count() -> u32 {
    return table[other_call.section].x;
}

fn other_entry_at(index: u32) -> vec4<u32> {
    return table[other_call.section + 1u + index];
}

// Whether an entry belongs to the shards of the dispatch.
fn other_has_entry(index: u32) -> bool {
    return other_entry_at(index).w == other_call.shards;
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/tile.wgsl#places
// ----------------------------------------------------------------------------------------------------

// The places of elements in a tile.
//
// A tile consists of runs of words: a token's row for keys, a channel's column for values. BITS 16 is f16.
//
// needs: TILE_TOKENS, call
// gives: BITS, FIELD_MASK, run_word, fields_of, field_of, place_of, top_place_of
// set by plans: BITS, KEYS

const other_BITS: u32 = 16u;
const other_KEYS: u32 = 0u;

// Fields of one word, bit planes of a byte lane (unused in f16), and the mask of a field. 3-bit codes lie in vectors of
// three words: two hold the low pairs of bits, one holds the top bits.
const other_FIELDS: u32 = 32u / other_BITS;
const other_PLANES: u32 = 8u / other_BITS;
const other_FIELD_MASK: u32 = (1u << other_BITS) - 1u;

// Runs of one vector group of a tile.
fn other_runs() -> u32 {
    return select(other_call.head_dim, other_TILE_TOKENS, other_KEYS == 1u);
}

// Word `word` of a tile as (run, word of the run).
fn other_run_word(word: u32) -> vec2<u32> {
    let vector = word / other_call.vector;
    return vec2<u32>(vector % other_runs(), vector / other_runs() * other_call.vector + word % other_call.vector);
}

// Word of the tile that is word `word` of a run.
fn other_tile_word(run: u32, word: u32) -> u32 {
    return (word / other_call.vector * other_runs() + run) * other_call.vector + word % other_call.vector;
}

// A part of a field: the bits of `mask`, starting at bit `low` of the field, lie at `shift` of the word.
struct other_Field {
    token: u32,
    channel: u32,
    shift: u32,
    low: u32,
    mask: u32,
}

// Number of fields that word `word` of a run holds parts of.
fn other_fields_of(word: u32) -> u32 {
    if (other_BITS == 3u) {
        return select(16u, 32u, word % 3u == 2u);
    }
    return other_FIELDS;
}

// The element in field `i` of a word of a run. Channels of a padded row lie beyond the head.
fn other_field_of(at: vec2<u32>, i: u32) -> other_Field {
    var group: u32;
    var lane = i % 4u;
    var shift: u32;
    var low = 0u;
    var mask = other_FIELD_MASK;
    if (other_BITS == 16u) {
        group = at.y / 2u;
        lane = at.y % 2u * 2u + i;
        shift = 16u * i;
    } else if (other_BITS == 3u) {
        let top = at.y % 3u == 2u;
        group = at.y / 3u * 8u + select(at.y % 3u * 4u, 0u, top) + i / 4u;
        shift = 8u * lane + select(2u, 1u, top) * (i / 4u);
        low = select(0u, 2u, top);
        mask = select(3u, 1u, top);
    } else {
        group = at.y * other_PLANES + i / 4u;
        shift = 8u * lane + other_BITS * (i / 4u);
    }
    if (other_KEYS == 1u) {
        return other_Field(at.x, 4u * group + lane, shift, low, mask);
    }
    return other_Field(group + 32u * lane, at.x, shift, low, mask);
}

// Byte lane, field group and run of an element.
fn other_element_place(token: u32, channel: u32) -> vec3<u32> {
    if (other_KEYS == 1u) {
        return vec3<u32>(channel % 4u, channel / 4u, token);
    }
    return vec3<u32>(token / 32u, token % 32u, channel);
}

// Word of the tile and shift of the field that hold an element, or the low pair of its three bits.
fn other_place_of(token: u32, channel: u32) -> vec2<u32> {
    let at = other_element_place(token, channel);
    if (other_BITS == 16u) {
        return vec2<u32>(other_tile_word(at.z, at.y * 2u + at.x / 2u), 16u * (at.x % 2u));
    }
    if (other_BITS == 3u) {
        return vec2<u32>(other_tile_word(at.z, at.y / 8u * 3u + at.y % 8u / 4u), 8u * at.x + 2u * (at.y % 4u));
    }
    return vec2<u32>(other_tile_word(at.z, at.y / max(other_PLANES, 1u)), 8u * at.x + other_BITS * (at.y % max(other_PLANES, 1u)));
}

// Word of the tile and shift of the top bit of a 3-bit element.
fn other_top_place_of(token: u32, channel: u32) -> vec2<u32> {
    let at = other_element_place(token, channel);
    return vec2<u32>(other_tile_word(at.z, at.y / 8u * 3u + 2u), 8u * at.x + at.y % 8u);
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/half.wgsl#conversions #flagged
// ----------------------------------------------------------------------------------------------------

// IEEE half precision by integer operations, because pack2x16float and unpack2x16float may round or flush as they like.
//
// gives: HALF_MAX, half_value, half_to_single, half_bits

const other_HALF_MAX: f32 = 65504f;

// The single-precision number that the low 16 bits of `half` hold.
fn other_half_value(half: u32) -> f32 {
    return bitcast<f32>(other_half_to_single(half & 0xffffu));
}

fn other_half_to_single(half: u32) -> u32 {
    let sign = (half & 0x8000u) << 16u;
    let exponent = (half >> 10u) & 31u;
    let mantissa = half & 0x3ffu;
    if (exponent == 0u) {
        // A subnormal is an exact multiple of 2^-24, and normal in single precision.
        return sign | bitcast<u32>(f32(mantissa) * 5.9604645e-8f);
    }
    if (exponent == 31u) {
        return sign | 0x7f800000u | (mantissa << 13u);
    }
    return sign | ((exponent + 112u) << 23u) | (mantissa << 13u);
}

// The nearest half to a finite number, ties to even, as 16 bits.
fn other_half_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x47800000u) {
        return sign | 0x7c00u;
    }
    if (magnitude >= 0x38800000u) {
        let rebiased = magnitude - 0x38000000u;
        return sign | ((rebiased + 0xfffu + ((rebiased >> 13u) & 1u)) >> 13u);
    }
    let shift = 126u - (magnitude >> 23u);
    if (shift > 24u) {
        return sign;
    }
    let mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    let quotient = mantissa >> shift;
    let remainder = mantissa - (quotient << shift);
    let middle = 1u << (shift - 1u);
    let up = remainder > middle || (remainder == middle && (quotient & 1u) == 1u);
    return sign | (quotient + u32(up));
}

// Elements that may be NaN, infinite or too large: these count as 0, and the first token with one is flagged. They are
// compared as integers, since compilers may assume that no float is NaN.
//
// needs: call
// gives: flagged_element
// binds: 5 flag

@group(0) @binding(13) var<storage, read_write> other_flag: atomic<u32>;

fn other_flagged_element(bits: u32, token: u32) -> f32 {
    if ((bits & 0x7fffffffu) > bitcast<u32>(other_call.largest)) {
        atomicMin(&other_flag, token);
        return 0f;
    }
    return bitcast<f32>(bits);
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/rows.wgsl#f16
// ----------------------------------------------------------------------------------------------------

// Elements of a dense f16 tensor, two to a word, the first in the low half.
//
// gives: element_bits, element
// binds: 1 rows

@group(0) @binding(9) var<storage, read> other_rows: array<u32>;

fn other_element_bits(index: u32) -> u32 {
    return other_half_to_single((other_rows[index / 2u] >> (16u * (index % 2u))) & 0xffffu);
}

fn other_element(index: u32) -> f32 {
    return bitcast<f32>(other_element_bits(index));
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/row.wgsl#plain
// ----------------------------------------------------------------------------------------------------

// A row in workgroup memory that is stored without rotation.
//
// needs: HEAD_DIM
// gives: put_channel, channel_value, finish_row

var<workgroup> other_row: array<f32, other_HEAD_DIM>;

fn other_put_channel(channel: u32, x: f32) {
    other_row[channel] = x;
}

fn other_channel_value(channel: u32) -> f32 {
    return other_row[channel];
}

fn other_finish_row(invocation: u32) {
    workgroupBarrier();
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/field.wgsl#f16
// ----------------------------------------------------------------------------------------------------

// Fields of f16 tiles.
//
// needs: Place
// gives: field_bits, field_value

fn other_field_bits(value: f32, place: other_Place, kv_head: u32, token: u32, channel: u32) -> u32 {
    return other_half_bits(value);
}

fn other_field_value(field: u32, place: other_Place, kv_head: u32, token: u32, channel: u32) -> f32 {
    return other_half_value(field);
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/finite.wgsl#flagged
// ----------------------------------------------------------------------------------------------------

// Elements that may be NaN, infinite or too large: these become zeros and set flags.
//
// needs: Place
// gives: storable

fn other_storable(bits: u32, place: other_Place, kv_head: u32, channel: u32) -> f32 {
    return other_flagged_element(bits, place.token);
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/words.wgsl#of_value
// ----------------------------------------------------------------------------------------------------

// The words of a value, which also hold other tokens. Tokens of one word may be stored at the same time. Nobody else
// changes the bits of a token's field, so the kernel clears and sets them with atomics. It reads nothing, so nothing
// waits for memory.
//
// needs: BITS, FIELD_MASK, HEAD_DIM, INVOCATIONS, Place, call, channel_value, field_bits, place_of, top_place_of
// gives: store_row
// binds: 2 tiles

@group(0) @binding(10) var<storage, read_write> other_tiles: array<atomic<u32>>;

fn other_store_row(place: other_Place, kv_head: u32, exists: bool, invocation: u32) {
    let tile = (place.page * other_call.kv_heads + kv_head) * other_call.tile_words;
    for (var channel = invocation; channel < other_HEAD_DIM; channel += other_INVOCATIONS) {
        let at = other_place_of(place.slot, channel);
        let bits = other_field_bits(other_channel_value(channel), place, kv_head, place.slot, channel);
        other_put_bits(tile + at.x, at.y, bits, select(other_FIELD_MASK, 3u, other_BITS == 3u));
        if (other_BITS == 3u) {
            let top = other_top_place_of(place.slot, channel);
            other_put_bits(tile + top.x, top.y, bits >> 2u, 1u);
        }
    }
}

fn other_put_bits(word: u32, shift: u32, bits: u32, mask: u32) {
    atomicAnd(&other_tiles[word], ~(mask << shift));
    atomicOr(&other_tiles[word], (bits & mask) << shift);
}

@compute @workgroup_size(64)
fn side_by_side(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    if (group.z == 0u) {
        append(group, groups, invocation);
    } else {
        other_append(group, groups, invocation);
    }
}
