// Slot `value_field`: four tokens of a channel of values as floats.
//
// Every choice has
//   const VALUE_PLANES: u32
//   const VALUE_WORD_FIELDS: u32
//     a vector holds VALUE_WORD_FIELDS · VALUE_PLANES field groups, the planes of one word side by side
//   const VALUE_VECTORS: u32
//     vectors of a column of a tile
//   fn value_field(words: ValueVector, w: u32, plane: u32, field: u32, k: u32) -> vec4<f32>
//     field group `field` of channel `k` of the lane
//
// gives: begin_value_tile

// Called before channel `k` of the lane is read from a tile. Reads its ranges.
fn begin_value_tile(tile_base: u32, channel: u32, k: u32) {}

// -------- channel_tokens --------

// Values with one range per channel and group of consecutive tokens: v = s c + m. The four tokens of a field group are
// 32 apart, so their ranges are those of the tile's four quarters, loaded once per tile and channel.
//
// needs: CHANNELS, HEAD_DIM, ValueVector
// gives: begin_value_tile, value_field
// binds: 6 value_ranges
// set by plans: VALUE_TOKEN_GROUPS

// import value_codes = attend/value_codes.wgsl#planes

@group(0) @binding(6) var<storage, read> value_ranges: array<u32>;

// Groups of tokens in a tile: 1, 2 or 4.
const VALUE_TOKEN_GROUPS: u32 = 4u;

var<private> value_scale: array<vec4<f32>, CHANNELS>;
var<private> value_min: array<vec4<f32>, CHANNELS>;

fn begin_value_tile(tile_base: u32, channel: u32, k: u32) {
    // unroll
    for (var quarter = 0u; quarter < 4u; quarter++) {
        let group = quarter * VALUE_TOKEN_GROUPS / 4u;
        let range = unpack2x16float(value_ranges[(tile_base * VALUE_TOKEN_GROUPS + group) * HEAD_DIM + channel]);
        value_scale[k][quarter] = range.x;
        value_min[k][quarter] = range.y;
    }
}

fn value_field(words: ValueVector, w: u32, plane: u32, field: u32, k: u32) -> vec4<f32> {
    return value_codes(words, w, plane) * value_scale[k] + value_min[k];
}

// -------- f16 --------

// A field group of f16 values is two words.
//
// needs: ValueVector
// gives: VALUE_WORD_FIELDS, VALUE_PLANES, VALUE_VECTORS, value_field

const VALUE_WORD_FIELDS: u32 = 2u;
const VALUE_PLANES: u32 = 1u;
const VALUE_VECTORS: u32 = 16u;

fn value_field(words: ValueVector, w: u32, plane: u32, field: u32, k: u32) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(words[w * 2u]), unpack2x16float(words[w * 2u + 1u]));
}

// -------- token_channels --------

// Values with one range per token and group of channels: v = s c + m. Four ranges per field group and channel group,
// the same for all channels of a group.
//
// needs: CHANNELS, HEAD_DIM, TILE_TOKENS, ValueVector
// gives: begin_value_tile, value_field
// binds: 6 value_ranges
// set by plans: VALUE_GROUP_CHANNELS

// import value_codes = attend/value_codes.wgsl#planes

@group(0) @binding(6) var<storage, read> value_ranges: array<u32>;

// Channels of a group, a multiple of 4, and groups of a head.
const VALUE_GROUP_CHANNELS: u32 = 32u;
const VALUE_CHANNEL_GROUPS: u32 = HEAD_DIM / VALUE_GROUP_CHANNELS;

// The place in the tile where the ranges of the channel's group begin.
var<private> value_range_base: array<u32, CHANNELS>;

fn begin_value_tile(tile_base: u32, channel: u32, k: u32) {
    value_range_base[k] = (tile_base * VALUE_CHANNEL_GROUPS + channel / VALUE_GROUP_CHANNELS) * TILE_TOKENS;
}

fn value_field(words: ValueVector, w: u32, plane: u32, field: u32, k: u32) -> vec4<f32> {
    let base = value_range_base[k] + field;
    let a = unpack2x16float(value_ranges[base]);
    let b = unpack2x16float(value_ranges[base + 32u]);
    let c = unpack2x16float(value_ranges[base + 64u]);
    let d = unpack2x16float(value_ranges[base + 96u]);
    return value_codes(words, w, plane) * vec4<f32>(a.x, b.x, c.x, d.x) + vec4<f32>(a.y, b.y, c.y, d.y);
}
