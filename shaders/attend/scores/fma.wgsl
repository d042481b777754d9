// Scores of keys by f32 multiply-add: score = Σ q k, for f16 keys and for ranges that change inside a row or a tile.
//
// The prepared query is one f32 row per span and query head, already scaled by log2(e) / √D, followed by four
// constants that this path does not use. It lies in workgroup memory and is read as 16-byte broadcasts, each used for
// the four tokens of an invocation. Keys: neighbouring lanes read neighbouring vectors.
//
// needs: HEADS, KV_HEADS, LANE_TOKENS, TILE_TOKENS, WorkItem, tile_bases, token_scores
// gives: KeyVector, KEY_VECTOR, QUERY_VECTORS, QUERY_ROW, query, key_pages, score_tile
// binds: 3 keys
// set by plans: KeyVector, KEY_VECTOR, KEY_VECTORS

alias KeyVector = vec4<u32>;

@group(0) @binding(3) var<storage, read> keys: array<KeyVector>;

// Words of a vector, and vectors of a token's row.
const KEY_VECTOR: u32 = 4u;
const KEY_VECTORS: u32 = 16u;

// import key_field = attend/key_field/f16.wgsl

const QUERY_VECTORS: u32 = KEY_VECTORS * KEY_WORD_FIELDS * KEY_PLANES;
const QUERY_ROW: u32 = QUERY_VECTORS + 1u;

var<workgroup> query: array<vec4<f32>, HEADS * QUERY_VECTORS>;

// import attend/add_product.wgsl

// import query = attend/query/prepared_f32.wgsl

fn key_pages() -> u32 {
    return arrayLength(&keys) / (KEY_VECTORS * TILE_TOKENS * KV_HEADS);
}

fn score_tile(item: WorkItem, tile: u32, lane: u32) {
    let tile_base = tile_bases[tile];
    // unroll
    for (var i = 0u; i < HEADS * LANE_TOKENS; i++) {
        token_scores[i] = 0f;
    }
    let first = tile_base * (KEY_VECTORS * TILE_TOKENS) + lane;
    for (var vector = 0u; vector < KEY_VECTORS; vector++) {
        let at = first + vector * TILE_TOKENS;
        var words: array<KeyVector, LANE_TOKENS>;
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            words[i] = keys[at + i * 32u];
        }
        for (var plane = 0u; plane < KEY_PLANES; plane++) {
            // unroll
            for (var w = 0u; w < KEY_WORD_FIELDS; w++) {
                let field = (vector * KEY_WORD_FIELDS + w) * KEY_PLANES + plane;
                begin_key_field(tile_base, lane, field);
                var k: array<vec4<f32>, LANE_TOKENS>;
                // unroll
                for (var i = 0u; i < LANE_TOKENS; i++) {
                    k[i] = key_field(words[i], w, plane, i);
                }
                // unroll
                for (var head = 0u; head < HEADS; head++) {
                    let q = query[head * QUERY_VECTORS + field];
                    // unroll
                    for (var i = 0u; i < LANE_TOKENS; i++) {
                        token_scores[head * LANE_TOKENS + i] = add_product(q, k[i], token_scores[head * LANE_TOKENS + i]);
                    }
                }
            }
        }
    }
}
