// Values with one range per token and group of channels: v = s c + m. Four ranges per field group and channel group,
// the same for all channels of a group.
//
// needs: CHANNELS, HEAD_DIM, TILE_TOKENS, ValueVector
// gives: begin_value_tile, value_field
// binds: 6 value_ranges
// set by plans: VALUE_GROUP_CHANNELS

// import value_codes = attend/value_codes/planes.wgsl

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
