// Slot `key_field`: four channels of keys as floats.
//
// Every choice has
//   const KEY_PLANES: u32
//   const KEY_WORD_FIELDS: u32
//     a vector holds KEY_WORD_FIELDS · KEY_PLANES field groups, the planes of one word side by side
//   fn key_field(words: KeyVector, w: u32, plane: u32, i: u32) -> vec4<f32>
//     of token `i` of the lane
//
// gives: begin_key_field

// Called before the field group `field` of the lane's tokens is used. Reads their ranges.
fn begin_key_field(tile_base: u32, lane: u32, field: u32) {}

// -------- channel_tokens --------

// Keys with one range per channel and group of consecutive tokens: k = s c + m. A range is the same for all lanes, so
// its load is one 16-byte broadcast for four channels.
//
// needs: HEAD_DIM, KeyVector, LANE_TOKENS
// gives: KEY_TOKEN_GROUPS, begin_key_field, key_field
// binds: 4 key_ranges
// set by plans: KEY_TOKEN_GROUPS

// import key_codes = attend/key_codes.wgsl#planes

@group(0) @binding(4) var<storage, read> key_ranges: array<vec4<u32>>;

// Groups of tokens in a tile: 1, 2 or 4.
const KEY_TOKEN_GROUPS: u32 = 4u;

var<private> key_scale: array<vec4<f32>, KEY_TOKEN_GROUPS>;
var<private> key_min: array<vec4<f32>, KEY_TOKEN_GROUPS>;

fn begin_key_field(tile_base: u32, lane: u32, field: u32) {
    // Channels past the head, in rows that do not fill a word, are multiplied by a zero query: any range in bounds will
    // do.
    let channels = min(field, HEAD_DIM / 4u - 1u);
    // unroll
    for (var group = 0u; group < KEY_TOKEN_GROUPS; group++) {
        let ranges = key_ranges[(tile_base * KEY_TOKEN_GROUPS + group) * (HEAD_DIM / 4u) + channels];
        let a = unpack2x16float(ranges.x);
        let b = unpack2x16float(ranges.y);
        let c = unpack2x16float(ranges.z);
        let d = unpack2x16float(ranges.w);
        key_scale[group] = vec4<f32>(a.x, b.x, c.x, d.x);
        key_min[group] = vec4<f32>(a.y, b.y, c.y, d.y);
    }
}

fn key_field(words: KeyVector, w: u32, plane: u32, i: u32) -> vec4<f32> {
    let group = i * KEY_TOKEN_GROUPS / LANE_TOKENS;
    return key_codes(words, w, plane) * key_scale[group] + key_min[group];
}

// -------- f16 --------

// A field group of f16 keys is two words.
//
// needs: KEY_VECTOR, KeyVector
// gives: KEY_WORD_FIELDS, KEY_PLANES, key_field

const KEY_WORD_FIELDS: u32 = KEY_VECTOR / 2u;
const KEY_PLANES: u32 = 1u;

fn key_field(words: KeyVector, w: u32, plane: u32, i: u32) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(words[w * 2u]), unpack2x16float(words[w * 2u + 1u]));
}

// -------- token_channels --------

// Keys with one range per token and group of channels: k = s c + m. Neighbouring lanes read neighbouring ranges.
//
// needs: HEAD_DIM, KeyVector, LANE_TOKENS, TILE_TOKENS
// gives: begin_key_field, key_field
// binds: 4 key_ranges
// set by plans: KEY_GROUP_CHANNELS

// import key_codes = attend/key_codes.wgsl#planes

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
