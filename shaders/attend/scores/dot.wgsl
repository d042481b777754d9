// Scores of packed keys by integer dot products: score = scale · Σ q c + bias.
//
// The prepared query is one row per span and query head: QUERY_PLANES byte planes of field-group words (low byte first,
// both signed) in the order of use, then the constants (scale, bias, Σ q, 0) as f32. It lies in workgroup memory and is
// read as 16-byte broadcasts, each used for the four tokens of an invocation. Neighbouring lanes read neighbouring
// vectors of keys and convert their fields to signed bytes (attend/key_bytes/).
//
// needs: HEADS, KV_HEADS, LANE_TOKENS, TILE_TOKENS, WorkItem, tile_bases, token_scores
// gives: KeyVector, KEY_VECTOR, QUERY_PLANES, QUERY_VECTORS, QUERY_ROW, query, key_pages, score_tile
// binds: 3 keys
// set by plans: KeyVector, KEY_VECTOR, KEY_VECTORS, QUERY_PLANES

alias KeyVector = vec4<u32>;

@group(0) @binding(3) var<storage, read> keys: array<KeyVector>;

// Words of a vector, and vectors of a token's row.
const KEY_VECTOR: u32 = 4u;
const KEY_VECTORS: u32 = 4u;

// import key_bytes = attend/key_bytes/top.wgsl

const QUERY_PLANES: u32 = 2u;
const QUERY_VECTORS: u32 = KEY_VECTORS * KEY_QUADS;
// One plane's sums start at the bits of 1.5 · 2^23 and are that float plus the sum: in magnitude a sum is at most
// HEAD_DIM · 127 · 128 < 2^22.
const SUM_START: i32 = i32((2u - QUERY_PLANES) * 1262485504u);
const QUERY_ROW: u32 = QUERY_PLANES * QUERY_VECTORS + 1u;

// import key_ranges = attend/key_ranges/folded.wgsl

var<workgroup> query: array<vec4<u32>, HEADS * QUERY_ROW>;

// import query = attend/query/prepared.wgsl

fn key_pages() -> u32 {
    return arrayLength(&keys) / (KEY_VECTORS * TILE_TOKENS * KV_HEADS);
}

fn score_tile(item: WorkItem, tile: u32, lane: u32) {
    let tile_base = tile_bases[tile];
    // [byte plane][head][token]
    var sums: array<i32, QUERY_PLANES * HEADS * LANE_TOKENS>;
    // unroll
    for (var i = 0u; i < QUERY_PLANES * HEADS * LANE_TOKENS; i++) {
        sums[i] = SUM_START;
    }
    let first = tile_base * (KEY_VECTORS * TILE_TOKENS) + lane;
    for (var vector = 0u; vector < KEY_VECTORS; vector++) {
        let at = first + vector * TILE_TOKENS;
        var words: array<KeyVector, LANE_TOKENS>;
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            words[i] = keys[at + i * 32u];
        }
        for (var quad = 0u; quad < KEY_QUADS; quad++) {
            var codes: array<u32, 16>;
            // unroll
            for (var f = 0u; f < 4u; f++) {
                // unroll
                for (var i = 0u; i < LANE_TOKENS; i++) {
                    codes[f * 4u + i] = key_bytes(words[i], quad, f);
                }
            }
            // unroll
            for (var head = 0u; head < HEADS; head++) {
                // unroll
                for (var plane = 0u; plane < QUERY_PLANES; plane++) {
                    let q = query[head * QUERY_ROW + plane * QUERY_VECTORS + vector * KEY_QUADS + quad];
                    // unroll
                    for (var i = 0u; i < LANE_TOKENS; i++) {
                        let at_sum = (plane * HEADS + head) * LANE_TOKENS + i;
                        // One addition of three operands for two products.
                        sums[at_sum] = sums[at_sum] + dot4I8Packed(codes[i], q.x) + dot4I8Packed(codes[4u + i], q.y);
                        sums[at_sum] = sums[at_sum] + dot4I8Packed(codes[8u + i], q.z) + dot4I8Packed(codes[12u + i], q.w);
                    }
                }
            }
        }
    }
    load_key_ranges(tile_base, lane);
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        let constants = bitcast<vec4<f32>>(query[head * QUERY_ROW + QUERY_ROW - 1u]);
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            let low = sums[head * LANE_TOKENS + i];
            let high = sums[((QUERY_PLANES - 1u) * HEADS + head) * LANE_TOKENS + i];
            let sum = select(f32(low + (high << 8u)), bitcast<f32>(low) - 12582912f, QUERY_PLANES == 1u);
            token_scores[head * LANE_TOKENS + i] = ranged_score(sum, constants, i);
        }
    }
}
