// ----------------------------------------------------------------------------------------------------
// shaders/pack/key_mean.wgsl
// ----------------------------------------------------------------------------------------------------

// key_mean: the mean of some keys, as the centre of a sequence. The keys are the tokens of a call, or the first tokens
// of sequences that begin with a step.
//
//   m = (k_1 + … + k_n) · 1 / n
//
// One invocation owns one channel of a KV head of a mean and adds its elements in token order; neighbours own
// neighbouring channels, so rows are read coalesced. Elements that are not finite, or are beyond `largest`, count as 0.
//
// In bounds: invocations beyond the means · `total` = kv_heads · head_dim return; the slots and the rows of the tokens
// were checked against the buffers when they were bound, or when a step's table was made for the layout that they were
// bound to. The loop is bounded by the tokens of the mean; divisors are sizes of a checked shape.
//
// gives: Mean
// binds: 7 centres

@group(0) @binding(7) var<storage, read_write> centres: array<f32>;

struct Mean {
    // Its first token, relative to the first of the span, and the number of tokens.
    first_token: u32,
    tokens: u32,
    // Slot of the centre.
    slot: u32,
    // 1 / tokens.
    factor: f32,
}

@compute @workgroup_size(64)
fn key_mean(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let index = flat_index(group, groups, invocation);
    if (index / call.total >= mean_count()) {
        return;
    }
    let mean = mean_at(index / call.total);
    let of_centre = index % call.total;
    let kv_head = of_centre / call.head_dim;
    let channel = of_centre % call.head_dim;
    var sum = 0f;
    for (var token = 0u; token < mean.tokens; token++) {
        // Compared as integers, since compilers may assume that no float is NaN.
        let bits = element_bits(row_start(mean.first_token + token, kv_head) + channel);
        if ((bits & 0x7fffffffu) <= bitcast<u32>(call.largest)) {
            sum += bitcast<f32>(bits);
        }
    }
    centres[mean.slot * call.total + of_centre] = sum * mean.factor;
}

// ----------------------------------------------------------------------------------------------------
// shaders/pack/flat.wgsl
// ----------------------------------------------------------------------------------------------------

// A one-dimensional grid, folded into two dimensions because a device dispatches few workgroups per dimension.
//
// gives: FLAT_WORKGROUP, flat_index

const FLAT_WORKGROUP: u32 = 64u;

fn flat_index(group: vec3<u32>, groups: vec3<u32>, invocation: u32) -> u32 {
    return (group.y * groups.x + group.x) * FLAT_WORKGROUP + invocation;
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
// shaders/pack/places.wgsl#listed
// ----------------------------------------------------------------------------------------------------

// Places that follow the arguments.
//
// needs: Place, call
// gives: place_count, place_at

fn place_count() -> u32 {
    return call.place_count;
}

fn place_at(index: u32) -> Place {
    return call.places[index];
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
// shaders/pack/half.wgsl#conversions
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

// ----------------------------------------------------------------------------------------------------
// shaders/pack/mean.wgsl#of_step
// ----------------------------------------------------------------------------------------------------

// Means of the first tokens of sequences that begin with a step. An entry holds the first token, the bits of 1 / n, and
// a word with n and, from bit 8 on, the slot of the centre.
//
// needs: Mean
// gives: mean_count, mean_at

fn mean_count() -> u32 {
    return entry_count();
}

fn mean_at(index: u32) -> Mean {
    let entry = entry_at(index);
    return Mean(entry.x, entry.z & 0xffu, entry.z >> 8u, bitcast<f32>(entry.y));
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
