// Keys as levels of a codebook: k = norm · level, one norm per token. Neighbouring lanes read neighbouring norms, once per
// tile.

// import common/levels.wgsl
// import key_codes = common/key_codes.wgsl

@group(0) @binding(4) var<storage, read> key_ranges: array<u32>;

// Levels above 0, ascending.
const KEY_LEVELS_LOW: vec4<f32> = vec4<f32>(1f, 2f, 3f, 4f);
const KEY_LEVELS_HIGH: vec4<f32> = vec4<f32>(5f, 6f, 7f, 8f);

var<private> key_norm: array<f32, LANE_TOKENS>;

fn begin_key_field(tile_base: u32, lane: u32, field: u32) {
    if (field == 0u) {
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            key_norm[i] = unpack2x16float(key_ranges[tile_base * TILE_TOKENS + i * 32u + lane]).x;
        }
    }
}

fn key_field(words: KeyVector, w: u32, plane: u32, i: u32) -> vec4<f32> {
    return levels_of(key_fields(words, w, plane), KEY_BITS, KEY_LEVELS_LOW, KEY_LEVELS_HIGH) * key_norm[i];
}
