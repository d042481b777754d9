// Keys with one range per channel and group of consecutive tokens: k = s c + m. A range is the same for all lanes, so
// its load is one 16-byte broadcast for four channels.
//
// needs: HEAD_DIM, KeyVector, LANE_TOKENS
// gives: KEY_TOKEN_GROUPS, begin_key_field, key_field
// binds: 4 key_ranges
// set by plans: KEY_TOKEN_GROUPS

// import key_codes = attend/key_codes/planes.wgsl

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
