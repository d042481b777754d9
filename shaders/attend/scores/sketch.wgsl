// Scores of keys with sign sketches (`format::sketch`) by integer dot products:
//
//   score = ρ level_s Σ q2 sign + norm unit Σ q1 (byte + 1/2)
//
// with the query q2 in the basis of the sketch, and q1 in that of the levels. At 1 bit there are no levels.
//
// The prepared query is KEY_PARTS rows per span and query head, the row of the signs first, each as in
// attend/scores/dot.wgsl. The top bit of a field is the sign, set below 0. The other bits are the code of a level.
//
// needs: HEADS, INVOCATIONS, KV_HEADS, LANE_TOKENS, TILE_TOKENS, WorkItem, prepared_row, tile_bases, token_scores
// gives: KeyVector, KEY_BITS, KEY_VECTOR, QUERY_PLANES, QUERY_VECTORS, QUERY_ROW, query, load_query, key_pages,
//   score_tile
// binds: 2 queries, 3 keys, 4 key_ranges
// set by plans: KeyVector, KEY_BITS, KEY_VECTOR, KEY_VECTORS, KEY_PARTS, LEVEL_UNIT, SKETCH_LEVEL, QUERY_PLANES

// import attend/level_bytes.wgsl

alias KeyVector = vec4<u32>;

@group(0) @binding(2) var<storage, read> queries: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> keys: array<KeyVector>;
// The row's norm, and the norm of the residual.
@group(0) @binding(4) var<storage, read> key_ranges: array<u32>;

const KEY_BITS: u32 = 4u;
// Words of a vector, and vectors of a token's row.
const KEY_VECTOR: u32 = 4u;
const KEY_VECTORS: u32 = 4u;

// import sketch_fields = attend/sketch_fields/planes.wgsl

const KEY_PARTS: u32 = 2u;
const LEVEL_UNIT: f32 = 1f;
const SKETCH_LEVEL: f32 = 0.11f;
const QUERY_PLANES: u32 = 2u;
const QUERY_VECTORS: u32 = KEY_VECTORS * KEY_QUADS;
const QUERY_ROW: u32 = QUERY_PLANES * QUERY_VECTORS + 1u;
const QUERY_ROWS: u32 = KEY_PARTS * QUERY_ROW;

var<workgroup> query: array<vec4<u32>, HEADS * QUERY_ROWS>;

fn load_query(item: WorkItem, y: u32, invocation: u32) {
    for (var i = invocation; i < HEADS * QUERY_ROWS; i += INVOCATIONS) {
        let row = min(prepared_row(item, y, i / QUERY_ROWS), arrayLength(&queries) / QUERY_ROWS - 1u);
        query[i] = queries[row * QUERY_ROWS + i % QUERY_ROWS];
    }
}

fn key_pages() -> u32 {
    return arrayLength(&keys) / (KEY_VECTORS * TILE_TOKENS * KV_HEADS);
}

fn score_tile(item: WorkItem, tile: u32, lane: u32) {
    let tile_base = tile_bases[tile];
    // [part][byte plane][head][token]
    var sums: array<i32, KEY_PARTS * QUERY_PLANES * HEADS * LANE_TOKENS>;
    // unroll
    for (var i = 0u; i < KEY_PARTS * QUERY_PLANES * HEADS * LANE_TOKENS; i++) {
        sums[i] = 0i;
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
            // unroll
            for (var part = 0u; part < KEY_PARTS; part++) {
                var bytes: array<u32, 16>;
                // unroll
                for (var f = 0u; f < 4u; f++) {
                    // unroll
                    for (var i = 0u; i < LANE_TOKENS; i++) {
                        bytes[f * 4u + i] = part_bytes(key_fields(words[i], quad, f), part);
                    }
                }
                // unroll
                for (var head = 0u; head < HEADS; head++) {
                    // unroll
                    for (var plane = 0u; plane < QUERY_PLANES; plane++) {
                        let q = query[head * QUERY_ROWS + part * QUERY_ROW + plane * QUERY_VECTORS + vector * KEY_QUADS + quad];
                        // unroll
                        for (var i = 0u; i < LANE_TOKENS; i++) {
                            sums[((part * QUERY_PLANES + plane) * HEADS + head) * LANE_TOKENS + i] +=
                                (dot4I8Packed(bytes[i], q.x) + dot4I8Packed(bytes[4u + i], q.y))
                                + (dot4I8Packed(bytes[8u + i], q.z) + dot4I8Packed(bytes[12u + i], q.w));
                        }
                    }
                }
            }
        }
    }
    // unroll
    for (var i = 0u; i < LANE_TOKENS; i++) {
        let norms = unpack2x16float(key_ranges[tile_base * TILE_TOKENS + i * 32u + lane]);
        // unroll
        for (var head = 0u; head < HEADS; head++) {
            var products: array<f32, KEY_PARTS>;
            // unroll
            for (var part = 0u; part < KEY_PARTS; part++) {
                let constants = bitcast<vec4<f32>>(query[head * QUERY_ROWS + part * QUERY_ROW + QUERY_ROW - 1u]);
                var sum = 0i;
                // unroll
                for (var plane = 0u; plane < QUERY_PLANES; plane++) {
                    sum += sums[((part * QUERY_PLANES + plane) * HEADS + head) * LANE_TOKENS + i] << (plane * 8u);
                }
                products[part] = part_product(f32(sum) * constants.x, constants.z, part);
            }
            var score = norms.y * products[0];
            // unroll
            for (var part = 0u; part < KEY_PARTS - 1u; part++) {
                score += norms.x * products[part + 1u];
            }
            token_scores[head * LANE_TOKENS + i] = score;
        }
    }
}

// The bytes of a field group: 1 for a sign below 0, or the bytes of levels.
fn part_bytes(fields: u32, part: u32) -> u32 {
    if (part == 0u) {
        return (fields >> (KEY_BITS - 1u)) & 0x01010101u;
    }
    return level_bytes(fields, KEY_BITS - 1u);
}

// The product of a part, given the sum over bytes times the query's scale. `total` is the sum over the query.
fn part_product(sum: f32, total: f32, part: u32) -> f32 {
    if (part == 0u) {
        return SKETCH_LEVEL * (total - 2f * sum);
    }
    return LEVEL_UNIT * (sum + 0.5f * total);
}
