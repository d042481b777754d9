// Keys with one range per token and group of channels: k = s c + m. Neighbouring lanes read neighbouring ranges.
//
// needs: HEAD_DIM, KeyVector, LANE_TOKENS, TILE_TOKENS
// gives: begin_key_field, key_field
// binds: 4 key_ranges
// set by plans: KEY_GROUP_CHANNELS

// import key_codes = attend/key_codes/planes.wgsl

@group(0) @binding(4) var<storage, read> key_ranges: array<u32>;

// Channels of a group, a multiple of 4, and groups of a head.
const KEY_GROUP_CHANNELS: u32 = 32u;
const KEY_CHANNEL_GROUPS: u32 = HEAD_DIM / KEY_GROUP_CHANNELS;

var<private> key_range: array<vec2<f32>, LANE_TOKENS>;

fn begin_key_field(tile_base: u32, lane: u32, field: u32) {
    // Channels past the head are multiplied by a zero query: any range in bounds will do.
    let group = min(field / (KEY_GROUP_CHANNELS / 4u), KEY_CHANNEL_GROUPS - 1u);
    // unroll
    for (var i = 0u; i < LANE_TOKENS; i++) {
        let token = i * 32u + lane;
        key_range[i] = unpack2x16float(key_ranges[(tile_base * KEY_CHANNEL_GROUPS + group) * TILE_TOKENS + token]);
    }
}

fn key_field(words: KeyVector, w: u32, plane: u32, i: u32) -> vec4<f32> {
    return key_codes(words, w, plane) * key_range[i].x + vec4<f32>(key_range[i].y);
}
