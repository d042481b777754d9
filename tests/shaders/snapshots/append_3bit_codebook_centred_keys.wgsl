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

@compute @workgroup_size(64)
fn append(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
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
// shaders/pack/places.wgsl#centred_tokens
// ----------------------------------------------------------------------------------------------------

// Tokens that a step stores centred. The slot of the centre takes the place of the range slot.
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
    return Place(entry.x, entry.y, entry.z & 0xffu, entry.z >> 8u);
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

const BITS: u32 = 3u;
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
// shaders/pack/row.wgsl#rotated
// ----------------------------------------------------------------------------------------------------

// A row in workgroup memory that is stored rotated.
//
// needs: rounded
// gives: put_channel, channel_value, finish_row

fn put_channel(channel: u32, x: f32) {
    let place = input_place(channel);
    rotated[place] = rounded(rotation_input(x, place));
}

fn channel_value(channel: u32) -> f32 {
    return rotated[channel];
}

fn finish_row(invocation: u32) {
    rotate_row(invocation);
}

// ----------------------------------------------------------------------------------------------------
// shaders/common/rotation.wgsl#rotate_row #rotation
// ----------------------------------------------------------------------------------------------------

// Rotates a row of HEAD_DIM channels in workgroup memory, in place: `format::Rotation`. Blocks of ORDER channels are
// multiplied with the Walsh-Hadamard matrix over √ORDER.
//
// Channels may first be dealt out to the blocks in turns: channel c then lies at `dealt(c)`. Code that writes a channel
// does so at `input_place` and applies `rotation_input`. Code that reads a channel does so at `output_place` and
// applies `unflipped`. An invocation owns pairs of channels. There is one barrier per butterfly stage, and every
// invocation of the workgroup must call.
//
// needs: HEAD_DIM, INVOCATIONS
// gives: rotated, rotate_row

var<workgroup> rotated: array<f32, HEAD_DIM>;

fn rotate_row(invocation: u32) {
    for (var stage = 0u; (1u << stage) < ROTATION_ORDER; stage++) {
        let half = 1u << stage;
        workgroupBarrier();
        for (var pair = invocation; pair < HEAD_DIM / 2u; pair += INVOCATIONS) {
            // pair / half · 2 half + pair % half. Compilers do not know the divisor and would divide.
            let low = ((pair >> stage) << (stage + 1u)) + (pair & (half - 1u));
            let a = rotated[low];
            let b = rotated[low + half];
            rotated[low] = a + b;
            rotated[low + half] = a - b;
        }
    }
    workgroupBarrier();
}

// `format::Rotation` of a row of channels: its numbers, and what becomes of a channel before and after the butterflies.
//
// gives: ROTATION_ORDER, dealt, input_place, output_place, rotation_input, scaled_input, unflipped, flipped
// set by plans: ROTATION_ORDER, ROTATION_SCALE, ROTATION_SIGNED, ROTATION_SEED, ROTATION_BACK, ROTATION_BLOCKS

const ROTATION_ORDER: u32 = 128u;
// 1 / √ORDER.
const ROTATION_SCALE: f32 = 0.088388346f;
// Whether signs are flipped, and the seed of the signs.
const ROTATION_SIGNED: u32 = 1u;
const ROTATION_SEED: u32 = 1953854050u;
// 1 for the inverse rotation: signs are flipped after the butterflies.
const ROTATION_BACK: u32 = 0u;

// Number of blocks that channels are dealt out to.
const ROTATION_BLOCKS: u32 = 1u;

fn dealt(channel: u32, blocks: u32) -> u32 {
    return channel % blocks * ROTATION_ORDER + channel / blocks;
}

fn input_place(channel: u32) -> u32 {
    return select(dealt(channel, ROTATION_BLOCKS), channel, ROTATION_BACK == 1u);
}

fn output_place(channel: u32) -> u32 {
    return select(channel, dealt(channel, ROTATION_BLOCKS), ROTATION_BACK == 1u);
}

fn rotation_input(x: f32, place: u32) -> f32 {
    return scaled_input(flipped(x, place, ROTATION_SEED, ROTATION_SIGNED & (1u - ROTATION_BACK)));
}

fn scaled_input(x: f32) -> f32 {
    // Bits of 2^-50: smaller elements count as 0.
    return select(x * ROTATION_SCALE, 0f, (bitcast<u32>(x) & 0x7fffffffu) < 0x26800000u);
}

fn unflipped(x: f32, place: u32) -> f32 {
    return flipped(x, place, ROTATION_SEED, ROTATION_SIGNED & ROTATION_BACK);
}

fn flipped(x: f32, place: u32, seed: u32, apply: u32) -> f32 {
    var word = seed + 0x9e3779b9u * (place + 1u);
    word = (word ^ (word >> 16u)) * 0x7feb352du;
    word = (word ^ (word >> 15u)) * 0x846ca68bu;
    let flip = (word ^ (word >> 16u)) & apply;
    return bitcast<f32>(bitcast<u32>(x) ^ (flip << 31u));
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/row_ranges.wgsl#norm
// ----------------------------------------------------------------------------------------------------

// The norm of a single row. It is stored with the tile, and the rounded value is kept for the codes.
//
// needs: Place, call
// gives: stored_norm, store_row_ranges
// binds: 3 ranges

@group(0) @binding(3) var<storage, read_write> ranges: array<u32>;

var<private> row_norm: f32;

fn stored_norm(place: Place, kv_head: u32, token: u32) -> f32 {
    return row_norm;
}

fn store_row_ranges(place: Place, kv_head: u32, invocation: u32) {
    let norm = row_norm_bits(invocation);
    if (invocation == 0u) {
        ranges[(place.page * call.kv_heads + kv_head) * call.ranges_per_tile + place.slot] = norm;
    }
    row_norm = half_value(norm);
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/norm.wgsl#row_norm_bits #norm
// ----------------------------------------------------------------------------------------------------

// The norm of the row in workgroup memory as 16 bits. Every invocation must call, and each gets the result.
//
// needs: HEAD_DIM, channel_value, rounded
// gives: row_squares, row_norm_bits, row_sum_of_squares

var<workgroup> row_squares: array<f32, HEAD_DIM / 4u>;
var<workgroup> row_norm_word: u32;

fn row_norm_bits(invocation: u32) -> u32 {
    if (invocation < HEAD_DIM / 4u) {
        row_squares[invocation] = sum_of_four(vec4<f32>(
            channel_value(invocation * 4u),
            channel_value(invocation * 4u + 1u),
            channel_value(invocation * 4u + 2u),
            channel_value(invocation * 4u + 3u),
        ));
    }
    workgroupBarrier();
    if (invocation == 0u) {
        row_norm_word = norm_bits(row_sum_of_squares());
    }
    workgroupBarrier();
    return row_norm_word;
}

fn row_sum_of_squares() -> f32 {
    var sum = 0f;
    // unroll
    for (var i = 0u; i < HEAD_DIM / 4u; i++) {
        sum = rounded(sum + row_squares[i]);
    }
    return sum;
}

// The stored norm of a row: `format::codebook::stored_norm`, bit for bit. Squares are summed over four channels, then
// over all fours in order, with a rounding after each operation.
//
// needs: HALF_MAX, half_bits, half_value, rounded
// gives: sum_of_four, norm_bits, renormalized_bits

fn square(x: f32) -> f32 {
    // Bits of 2^-50: smaller elements count as 0.
    return select(rounded(x * x), 0f, (bitcast<u32>(x) & 0x7fffffffu) < 0x26800000u);
}

fn sum_of_four(x: vec4<f32>) -> f32 {
    return rounded(rounded(square(x.x) + square(x.y)) + rounded(square(x.z) + square(x.w)));
}

fn norm_bits(sum: f32) -> u32 {
    return nearest_root(sum, 1f);
}

// The norm divided by that of its levels, given the sum of their squares: `format::codebook::renormalized`.
fn renormalized_bits(norm: f32, sum: f32) -> u32 {
    return nearest_root(norm * norm, sum);
}

// The half nearest to the root of `sum / divisor`, ties to even. The inexact root only decides where to search.
fn nearest_root(sum: f32, divisor: f32) -> u32 {
    let estimate = half_bits(min(sqrt(sum / divisor), HALF_MAX));
    let odd = (estimate & 1u) == 1u;
    let below = rounded(midpoint_square(max(estimate, 1u) - 1u) * divisor);
    let above = rounded(midpoint_square(estimate) * divisor);
    var half = estimate;
    if (estimate > 0u && (sum < below || (sum == below && odd))) {
        half = estimate - 1u;
    } else if (estimate < 0x7bffu && (sum > above || (sum == above && odd))) {
        half = estimate + 1u;
    }
    // A subnormal half counts as the nearer of 0 and the smallest normal one.
    return select(half, select(0u, 0x400u, half >= 0x200u), half < 0x400u);
}

// The exact square of the midpoint between a half and the next one.
fn midpoint_square(half: u32) -> f32 {
    let middle = (half_value(half) + half_value(half + 1u)) * 0.5;
    return middle * middle;
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/field.wgsl#codebook
// ----------------------------------------------------------------------------------------------------

// Fields of tiles of codebook codes, stored signed, and their norms.
//
// needs: Place
// gives: field_bits, field_value

fn field_bits(value: f32, place: Place, kv_head: u32, token: u32, channel: u32) -> u32 {
    return level_field(value, stored_norm(place, kv_head, token));
}

fn field_value(field: u32, place: Place, kv_head: u32, token: u32, channel: u32) -> f32 {
    return stored_norm(place, kv_head, token) * level_value(field);
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/level_fields.wgsl#levels
// ----------------------------------------------------------------------------------------------------

// Codes of levels, stored signed: `format::Codebook`, bit for bit.
//
// needs: rounded
// gives: level_field, level_value
// set by plans: LEVEL_BITS, LEVELS, LEVELS_LOW, LEVELS_HIGH, BOUNDARIES_LOW, BOUNDARIES_HIGH

const LEVEL_BITS: u32 = 3u;
// Levels above 0, and the boundaries above 0 between them.
const LEVELS: u32 = 4u;
const LEVELS_LOW: vec4<f32> = vec4<f32>(0.021290585f, 0.06727825f, 0.11837566f, 0.18820877f);
const LEVELS_HIGH: vec4<f32> = vec4<f32>(0.0f, 0.0f, 0.0f, 0.0f);
const BOUNDARIES_LOW: vec4<f32> = vec4<f32>(0.04428442f, 0.092826955f, 0.15329221f, 0.0f);
const BOUNDARIES_HIGH: vec4<f32> = vec4<f32>(0.0f, 0.0f, 0.0f, 0.0f);

// The field of the nearest level. A boundary belongs to the lower level.
fn level_field(value: f32, norm: f32) -> u32 {
    if (norm == 0f) {
        return LEVELS;
    }
    let negative = !(value > 0f);
    let magnitude = abs(value);
    var index = 0u;
    // unroll
    for (var i = 0u; i < LEVELS - 1u; i++) {
        let boundary = rounded(norm * select(BOUNDARIES_HIGH[i % 4u], BOUNDARIES_LOW[i % 4u], i < 4u));
        index += u32(magnitude > boundary || (magnitude == boundary && negative));
    }
    return select(LEVELS + index, LEVELS - 1u - index, negative) ^ LEVELS;
}

// The level of a field, relative to the norm. Higher bits are ignored.
fn level_value(field: u32) -> f32 {
    // A field is the code minus the middle one, in two's complement. The top bit is the sign, and below 0 the distance
    // counts from -1. Levels below 0 are the negatives of those above.
    let negative = (field >> (LEVEL_BITS - 1u)) & 1u;
    let index = (field ^ (0u - negative)) & ((1u << (LEVEL_BITS - 1u)) - 1u);
    let four = select(LEVELS_HIGH, LEVELS_LOW, index < 4u);
    let two = select(four.zw, four.xy, (index & 2u) == 0u);
    let level = select(two.y, two.x, (index & 1u) == 0u);
    return bitcast<f32>(bitcast<u32>(level) ^ (negative << 31u));
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/finite.wgsl#centred
// ----------------------------------------------------------------------------------------------------

// Elements of keys that may be NaN, infinite or too large: these become zeros and set flags. The centre of the sequence
// is subtracted from every element. Its slot takes the place of the range slot (`places.wgsl#centred_tokens`).
//
// needs: HEAD_DIM, Place, call
// gives: storable
// binds: 7 centres

@group(0) @binding(7) var<storage, read> centres: array<f32>;

fn storable(bits: u32, place: Place, kv_head: u32, channel: u32) -> f32 {
    let centre = (place.range_slot * call.kv_heads + kv_head) * HEAD_DIM;
    return flagged_element(bits, place.token) - centres[centre + channel];
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
