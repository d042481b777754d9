// Slot `run_values`: the values of eight tokens of a channel, from memory to halves.
//
// Every choice has
//   alias ValueWord
//     what is read of them
//   fn run_value_pages() -> u32
//   fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord
//     tokens 2 vector + i / 4 + 32 (i % 4) of a tile, i below 8
//   fn value_halves(word: ValueWord, vector: u32) -> Eight
//   fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>, share: f32) -> vec4<f32>
//     outputs of four channels, of the weighted sum of the halves and the sum of the weights, which is 1 without a sink
//
// gives: load_ranges, store_ranges

// Loads the ranges of the 16 tokens of a step, and stores them a barrier before codes become halves. Choices that read
// ranges with the codes, or have none, do nothing.
fn load_ranges(tile_base: u32, step: u32, invocation: u32) {}

fn store_ranges(invocation: u32) {}

// -------- channel --------

// Values with a range per channel of the span: halves are codes, counted from the middle. v = s (c + middle) + m is
// computed from their mean.
//
// needs: CODES, Eight, HEAD_DIM, KV_HEADS, code_halves
// gives: ValueWord, load_value, value_halves, run_output
// binds: 6 value_span_ranges

// import run_value_codes = attend/run_value_codes.wgsl#words

alias ValueWord = vec2<u32>;

// Scale and minimum: [range slot][KV head][channel].
@group(0) @binding(6) var<storage, read> value_span_ranges: array<vec2<f32>>;

const VALUE_MIDDLE: u32 = 1u << (VALUE_BITS - 1u);

fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord {
    return load_value_codes(tile_base, vector, channel);
}

fn value_halves(word: ValueWord, vector: u32) -> Eight {
    return code_halves(word, vector, VALUE_BITS, CODES + f16(VALUE_MIDDLE));
}

fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>, share: f32) -> vec4<f32> {
    let slot = min(range_slot, arrayLength(&value_span_ranges) / (KV_HEADS * HEAD_DIM) - 1u);
    let base = (slot * KV_HEADS + kv_head) * HEAD_DIM + channel;
    var output: vec4<f32>;
    // unroll
    for (var i = 0u; i < 4u; i++) {
        let range = value_span_ranges[base + i];
        output[i] = range.x * (mean[i] + f32(VALUE_MIDDLE) * share) + range.y * share;
    }
    return output;
}

// -------- channel_4bit --------

// Values of 4 bits with a range per channel of the span: halves are codes. v = s (c + 8) + m is computed from their
// mean.
//
// needs: Eight, HEAD_DIM, KV_HEADS, TOKEN_VECTORS
// gives: ValueWord, run_value_pages, load_value, value_halves, run_output
// binds: 5 values, 6 value_span_ranges

// import attend/codes.wgsl#four_bits

alias ValueWord = u32;

@group(0) @binding(5) var<storage, read> values: array<vec4<u32>>;
// Scale and minimum: [range slot][KV head][channel].
@group(0) @binding(6) var<storage, read> value_span_ranges: array<vec2<f32>>;

fn run_value_pages() -> u32 {
    return arrayLength(&values) / (TOKEN_VECTORS / 4u * HEAD_DIM * KV_HEADS);
}

fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord {
    return values[(tile_base * (TOKEN_VECTORS / 4u) + vector / 4u) * HEAD_DIM + channel][vector % 4u];
}

fn value_halves(word: ValueWord, vector: u32) -> Eight {
    return code_halves(word, SIGNED_CODES);
}

fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>, share: f32) -> vec4<f32> {
    let slot = min(range_slot, arrayLength(&value_span_ranges) / (KV_HEADS * HEAD_DIM) - 1u);
    let base = (slot * KV_HEADS + kv_head) * HEAD_DIM + channel;
    var output: vec4<f32>;
    // unroll
    for (var i = 0u; i < 4u; i++) {
        let range = value_span_ranges[base + i];
        output[i] = range.x * (mean[i] + 8f * share) + range.y * share;
    }
    return output;
}

// -------- channel_tokens --------

// Values with a range per channel and group of tokens: v = s c + m.
//
// needs: CODES, Eight, HEAD_DIM, Half2, Half4, code_halves
// gives: ValueWord, load_value, value_halves, run_output
// binds: 6 value_ranges
// set by plans: VALUE_TOKEN_GROUPS

// import run_value_codes = attend/run_value_codes.wgsl#words

// Groups of tokens in a tile: 1, 2 or 4.
const VALUE_TOKEN_GROUPS: u32 = 4u;

struct ValueWord {
    codes: vec2<u32>,
    // Ranges of the tokens of every quarter of the tile.
    ranges: vec4<u32>,
}

@group(0) @binding(6) var<storage, read> value_ranges: array<u32>;

fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord {
    var word: ValueWord;
    word.codes = load_value_codes(tile_base, vector, channel);
    // unroll
    for (var i = 0u; i < 4u; i++) {
        let group = tile_base * VALUE_TOKEN_GROUPS + i * VALUE_TOKEN_GROUPS / 4u;
        word.ranges[i] = value_ranges[group * HEAD_DIM + channel];
    }
    return word;
}

fn value_halves(word: ValueWord, vector: u32) -> Eight {
    let codes = code_halves(word.codes, vector, VALUE_BITS, CODES);
    let a = Half2(unpack2x16float(word.ranges.x));
    let b = Half2(unpack2x16float(word.ranges.y));
    let c = Half2(unpack2x16float(word.ranges.z));
    let d = Half2(unpack2x16float(word.ranges.w));
    let scales = Half4(a.x, b.x, c.x, d.x);
    let lowest = Half4(a.y, b.y, c.y, d.y);
    return Eight(fma(codes.low, scales, lowest), fma(codes.high, scales, lowest));
}

fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>, share: f32) -> vec4<f32> {
    return mean;
}

// -------- f16 --------

// Values in f16.
//
// needs: Eight, HEAD_DIM, Half4, KV_HEADS, TOKEN_VECTORS
// gives: ValueWord, run_value_pages, load_value, value_halves, run_output
// binds: 5 values

alias ValueWord = vec4<u32>;

@group(0) @binding(5) var<storage, read> values: array<vec4<u32>>;

fn run_value_pages() -> u32 {
    return arrayLength(&values) / (TOKEN_VECTORS * HEAD_DIM * KV_HEADS);
}

fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord {
    return values[(tile_base * TOKEN_VECTORS + vector) * HEAD_DIM + channel];
}

fn value_halves(word: ValueWord, vector: u32) -> Eight {
    let a = vec2<f16>(unpack2x16float(word.x));
    let b = vec2<f16>(unpack2x16float(word.y));
    let c = vec2<f16>(unpack2x16float(word.z));
    let d = vec2<f16>(unpack2x16float(word.w));
    return Eight(Half4(a, b), Half4(c, d));
}

fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>, share: f32) -> vec4<f32> {
    return mean;
}

// -------- levels --------

// Values as levels of a codebook times the norm of their token. The unit of levels is that of the outputs.
//
// needs: Eight, Half2, Half4, TILE_TOKENS
// gives: ValueWord, load_value, value_halves, run_output
// binds: 6 value_ranges
// set by plans: VALUE_UNIT

// import run_value_codes = attend/run_value_codes.wgsl#words
// import attend/codes.wgsl#level_halves

struct ValueWord {
    codes: vec2<u32>,
    // Norms of tokens 2 vector + 32 i and of the tokens after them.
    norms: array<vec2<u32>, 4>,
}

// 128 units of the codebook.
const VALUE_UNIT: f32 = 1f;

// Norms of two neighbouring tokens.
@group(0) @binding(6) var<storage, read> value_ranges: array<vec2<u32>>;

fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord {
    var word: ValueWord;
    word.codes = load_value_codes(tile_base, vector, channel);
    // unroll
    for (var i = 0u; i < 4u; i++) {
        word.norms[i] = value_ranges[tile_base * (TILE_TOKENS / 2u) + i * 16u + vector];
    }
    return word;
}

fn value_halves(word: ValueWord, vector: u32) -> Eight {
    let levels = level_halves(word.codes, vector, VALUE_BITS);
    var norms: array<Half4, 2>;
    // unroll
    for (var next = 0u; next < 2u; next++) {
        // unroll
        for (var i = 0u; i < 4u; i++) {
            norms[next][i] = Half2(unpack2x16float(word.norms[i][next])).x;
        }
    }
    return Eight(levels.low * norms[0], levels.high * norms[1]);
}

fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>, share: f32) -> vec4<f32> {
    return mean * VALUE_UNIT;
}

// -------- token --------

// Values with a range per token and group of channels, or one per token: v = s c + m.
//
// needs: CODES, Eight, HEAD_DIM, Half2, Half4, TILE_TOKENS, code_halves
// gives: ValueWord, load_value, value_halves, run_output
// binds: 6 value_ranges
// set by plans: VALUE_CHANNEL_GROUPS

// import run_value_codes = attend/run_value_codes.wgsl#words

// Groups of channels of a row.
const VALUE_CHANNEL_GROUPS: u32 = 1u;

struct ValueWord {
    codes: vec2<u32>,
    // Ranges of tokens 2 vector + 32 i and of the tokens after them.
    ranges: array<vec2<u32>, 4>,
}

// Ranges of two neighbouring tokens.
@group(0) @binding(6) var<storage, read> value_ranges: array<vec2<u32>>;

fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord {
    var word: ValueWord;
    word.codes = load_value_codes(tile_base, vector, channel);
    let group = tile_base * VALUE_CHANNEL_GROUPS + channel * VALUE_CHANNEL_GROUPS / HEAD_DIM;
    // unroll
    for (var i = 0u; i < 4u; i++) {
        word.ranges[i] = value_ranges[group * (TILE_TOKENS / 2u) + i * 16u + vector];
    }
    return word;
}

fn value_halves(word: ValueWord, vector: u32) -> Eight {
    let codes = code_halves(word.codes, vector, VALUE_BITS, CODES);
    var scales: array<Half4, 2>;
    var lowest: array<Half4, 2>;
    // unroll
    for (var next = 0u; next < 2u; next++) {
        // unroll
        for (var i = 0u; i < 4u; i++) {
            let range = Half2(unpack2x16float(word.ranges[i][next]));
            scales[next][i] = range.x;
            lowest[next][i] = range.y;
        }
    }
    return Eight(fma(codes.low, scales[0], lowest[0]), fma(codes.high, scales[1], lowest[1]));
}

fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>, share: f32) -> vec4<f32> {
    return mean;
}

// -------- token_4bit --------

// Values of 4 bits with a range per token: v = s c + m.
//
// needs: Eight, HEAD_DIM, Half4, KV_HEADS, TILE_TOKENS, TOKEN_VECTORS
// gives: ValueWord, run_value_pages, load_value, value_halves, run_output
// binds: 5 values, 6 value_ranges

// import attend/codes.wgsl#four_bits

struct ValueWord {
    codes: u32,
    // Ranges of tokens 2 vector + 32 i and of the tokens after them.
    ranges: array<vec2<u32>, 4>,
}

@group(0) @binding(5) var<storage, read> values: array<vec4<u32>>;
// Ranges of two neighbouring tokens.
@group(0) @binding(6) var<storage, read> value_ranges: array<vec2<u32>>;

fn run_value_pages() -> u32 {
    return arrayLength(&values) / (TOKEN_VECTORS / 4u * HEAD_DIM * KV_HEADS);
}

fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord {
    var word: ValueWord;
    word.codes = values[(tile_base * (TOKEN_VECTORS / 4u) + vector / 4u) * HEAD_DIM + channel][vector % 4u];
    // unroll
    for (var i = 0u; i < 4u; i++) {
        word.ranges[i] = value_ranges[tile_base * (TILE_TOKENS / 2u) + i * 16u + vector];
    }
    return word;
}

fn value_halves(word: ValueWord, vector: u32) -> Eight {
    let codes = code_halves(word.codes, CODES);
    var scales: array<Half4, 2>;
    var lowest: array<Half4, 2>;
    // unroll
    for (var next = 0u; next < 2u; next++) {
        // unroll
        for (var i = 0u; i < 4u; i++) {
            let range = Half2(unpack2x16float(word.ranges[i][next]));
            scales[next][i] = range.x;
            lowest[next][i] = range.y;
        }
    }
    return Eight(fma(codes.low, scales[0], lowest[0]), fma(codes.high, scales[1], lowest[1]));
}

fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>, share: f32) -> vec4<f32> {
    return mean;
}

// -------- token_staged --------

// Values with a range per token: v = s c + m. All channels of a token have one, so the ranges of a step lie in workgroup
// memory. An invocation that loaded those of its eight tokens itself would keep eight more registers for a whole step.
//
// needs: CODES, Eight, Half2, Half4, TILE_TOKENS, code_halves
// gives: ValueWord, load_ranges, store_ranges, load_value, value_halves, run_output
// binds: 6 value_ranges

// import run_value_codes = attend/run_value_codes.wgsl#words

alias ValueWord = vec2<u32>;

// Ranges of two neighbouring tokens.
@group(0) @binding(6) var<storage, read> value_ranges: array<vec2<u32>>;

var<private> arriving_range: u32;

// Of every vector of eight tokens of a step: two vectors of scales, and two of the lowest values.
var<workgroup> step_ranges: array<Half4, 8>;

fn load_ranges(tile_base: u32, step: u32, invocation: u32) {
    // Vector place / 8 of the step, token 2 vector + place / 4 % 2 + 32 (place % 4) of the tile.
    let place = min(invocation, 15u);
    let vector = step * 2u + place / 8u;
    arriving_range = value_ranges[tile_base * (TILE_TOKENS / 2u) + place % 4u * 16u + vector][place / 4u % 2u];
}

fn store_ranges(invocation: u32) {
    if (invocation < 16u) {
        let range = Half2(unpack2x16float(arriving_range));
        let to = invocation / 8u * 4u + invocation / 4u % 2u;
        step_ranges[to][invocation % 4u] = range.x;
        step_ranges[to + 2u][invocation % 4u] = range.y;
    }
}

fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord {
    return load_value_codes(tile_base, vector, channel);
}

fn value_halves(word: ValueWord, vector: u32) -> Eight {
    let codes = code_halves(word, vector, VALUE_BITS, CODES);
    let at = vector % 2u * 4u;
    return Eight(
        fma(codes.low, step_ranges[at], step_ranges[at + 2u]),
        fma(codes.high, step_ranges[at + 1u], step_ranges[at + 3u]),
    );
}

fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>, share: f32) -> vec4<f32> {
    return mean;
}
