// Values with one range per channel and group of consecutive tokens: v = s c + m. The four tokens of a field group are
// 32 apart, so their ranges are those of the tile's four quarters, loaded once per tile and channel.
//
// needs: CHANNELS, HEAD_DIM, ValueVector
// gives: begin_value_tile, value_field
// binds: 6 value_ranges
// set by plans: VALUE_TOKEN_GROUPS

// import value_codes = attend/value_codes/planes.wgsl

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
