// Slot `key_ranges`: turns an integer dot product into a score. By default per-channel ranges are folded into the
// prepared query: scale and bias are those of the query head.
//
// gives: load_key_ranges, ranged_score

// Called once per tile, between its products and its scores. Reads the ranges of the lane's tokens.
fn load_key_ranges(tile_base: u32, lane: u32) {}

// The score of token `i` of the lane, of its dot product and the constants of the prepared query: (scale, bias, Σ q, 0).
fn ranged_score(sum: f32, constants: vec4<f32>, i: u32) -> f32 {
    return sum * constants.x + constants.y;
}

// -------- token --------

// One range per token: k = s u + m with u = c + 2^(bits-1), so q·k = s Σ q c + (m + 2^(bits-1) s) Σ q. Or one norm:
// k = s u with u = (c + 1/2) · unit, where KEY_MIDDLE is half a unit.
//
// needs: LANE_TOKENS, TILE_TOKENS
// gives: load_key_ranges, ranged_score
// binds: 4 key_ranges
// set by plans: KEY_MIDDLE

@group(0) @binding(4) var<storage, read> key_ranges: array<u32>;

const KEY_MIDDLE: f32 = 8f;

var<private> key_range: array<vec2<f32>, LANE_TOKENS>;

fn load_key_ranges(tile_base: u32, lane: u32) {
    // unroll
    for (var i = 0u; i < LANE_TOKENS; i++) {
        key_range[i] = unpack2x16float(key_ranges[tile_base * TILE_TOKENS + i * 32u + lane]);
    }
}

fn ranged_score(sum: f32, constants: vec4<f32>, i: u32) -> f32 {
    let range = key_range[i];
    return range.x * (sum * constants.x) + (range.y + KEY_MIDDLE * range.x) * constants.z;
}
