// Slot `step_scores`: scores of the keys of a tile for the query heads of a workgroup.
//
// Every choice has
//   fn load_query(item: WorkItem, y: u32, invocation: u32)
//     called first, by all invocations: keeps the queries; a barrier follows
//   fn score_tile(item: WorkItem, tile: u32, lane: u32)
//     leaves the scores of the lane's tokens of a tile of the item in `token_scores`, in units of log2; tokens beyond the item's
//     too, which are overwritten
//
// gives: key_pages, begin_keys, prepare_keys, prepare_keys_late

// Number of pages of the bound keys. No limit if none are bound.
fn key_pages() -> u32 {
    return 0xffffffffu;
}

// Called after that barrier. Prepares the keys of the first step.
fn begin_keys(tiles: u32, team: u32, lane: u32) {}

// Called before the second barrier of a step. Prepares those of the next step, whose first tile is `first`.
fn prepare_keys(first: u32, tiles: u32, team: u32, lane: u32) {}

// Called once the values of a step are added, when no barrier follows. Also prepares those of the next step.
fn prepare_keys_late(first: u32, tiles: u32, team: u32, lane: u32) {}

// -------- dot --------

// Scores of packed keys by integer dot products: score = scale · Σ q c + bias.
//
// The prepared query is one row per span and query head: QUERY_PLANES byte planes of field-group words (low byte first,
// both signed) in the order of use, then the constants (scale, bias, Σ q, 0) as f32. It lies in workgroup memory and is
// read as 16-byte broadcasts, each used for the four tokens of an invocation. Neighbouring lanes read neighbouring
// vectors of keys and convert their fields to signed bytes (attend/key_bytes.wgsl).
//
// needs: HEADS, KV_HEADS, LANE_TOKENS, TILE_TOKENS, WorkItem, tile_bases, token_scores
// gives: KeyVector, KEY_VECTOR, QUERY_PLANES, QUERY_VECTORS, QUERY_ROW, query, key_pages, score_tile
// binds: 3 keys
// set by plans: KeyVector, KEY_VECTOR, KEY_VECTORS, QUERY_PLANES

// import key_bytes = attend/key_bytes.wgsl#top
// import key_ranges = attend/key_ranges.wgsl
// import query = attend/query.wgsl#prepared

alias KeyVector = vec4<u32>;

@group(0) @binding(3) var<storage, read> keys: array<KeyVector>;

// Words of a vector, and vectors of a token's row.
const KEY_VECTOR: u32 = 4u;
const KEY_VECTORS: u32 = 4u;

const QUERY_PLANES: u32 = 2u;
const QUERY_VECTORS: u32 = KEY_VECTORS * KEY_QUADS;
// One plane's sums start at the bits of 1.5 · 2^23 and are that float plus the sum: in magnitude a sum is at most
// HEAD_DIM · 127 · 128 < 2^22.
const SUM_START: i32 = i32((2u - QUERY_PLANES) * 1262485504u);
const QUERY_ROW: u32 = QUERY_PLANES * QUERY_VECTORS + 1u;

var<workgroup> query: array<vec4<u32>, HEADS * QUERY_ROW>;

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

// -------- fma --------

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

// import key_field = attend/key_field.wgsl#f16
// import attend/products.wgsl#add_product
// import query = attend/query.wgsl#prepared_f32

alias KeyVector = vec4<u32>;

@group(0) @binding(3) var<storage, read> keys: array<KeyVector>;

// Words of a vector, and vectors of a token's row.
const KEY_VECTOR: u32 = 4u;
const KEY_VECTORS: u32 = 16u;

const QUERY_VECTORS: u32 = KEY_VECTORS * KEY_WORD_FIELDS * KEY_PLANES;
const QUERY_ROW: u32 = QUERY_VECTORS + 1u;

var<workgroup> query: array<vec4<f32>, HEADS * QUERY_VECTORS>;

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

// -------- groups --------

// Scores of packed keys with one range per channel and group of consecutive tokens, by integer dot products:
//
//   score = unit (Σ round(q s_g / unit) c + Σ q (m_g + 2^(bits-1) s_g) / unit)
//
// The scales of a group are multiplied into the query, which is converted to bytes separately for every group of a
// tile, in the order of use (attend/prepared_query.wgsl#query_fields). The bytes are relative to the largest |q s_g| of
// the whole tile: that takes one maximum over the team per head, where separate units would take one per group. A team
// does this for its next tile between two barriers of a step (attend/query_bytes.wgsl); a lane takes the field groups lane,
// lane + 32, ... The query lies in workgroup memory as one f32 row per head, scaled by log2(e) / √D. Groups of eight
// neighbouring lanes or more read neighbouring vectors of keys and convert their fields to signed bytes
// (attend/key_bytes.wgsl).
//
// needs: HEADS, HEAD_DIM, KV_HEADS, LANE_TOKENS, STEP_TILES, TILE_TOKENS, WorkItem, tile_bases, token_scores
// gives: KeyVector, KEY_VECTOR, KEY_TOKEN_GROUPS, QUERY_VECTORS, QUERY_ROW, query, STEP_QUERY_VECTORS, group_biases,
//   field_ranges, field_scales, field_middles, inverse_unit, begin_keys, make_query_bytes, key_pages, score_tile
// binds: 3 keys, 4 key_ranges
// set by plans: KeyVector, KEY_VECTOR, KEY_VECTORS, KEY_AHEAD, KEY_TOKEN_GROUPS, KEY_MIDDLE

// import key_bytes = attend/key_bytes.wgsl#top
// import attend/prepared_query.wgsl#query_fields
// import query_bytes = attend/query_bytes.wgsl#own
// import query = attend/query.wgsl#prepared_f32
// import key_totals = attend/key_totals.wgsl#memory

alias KeyVector = vec4<u32>;

@group(0) @binding(3) var<storage, read> keys: array<KeyVector>;
// Scale and minimum in f16: [tile][group of tokens][channel].
@group(0) @binding(4) var<storage, read> key_ranges: array<vec4<u32>>;

// Words of a vector, and vectors of a token's row.
const KEY_VECTOR: u32 = 4u;
const KEY_VECTORS: u32 = 4u;
// Vectors of a token that are loaded together. It divides the number of its vectors.
const KEY_AHEAD: u32 = 4u;

// Groups of tokens in a tile: 1, 2 or 4.
const KEY_TOKEN_GROUPS: u32 = 4u;
const KEY_MIDDLE: f32 = 8f;
// Sums start at the bits of 1.5 · 2^23 and are that float plus the sum: in magnitude a sum is at most
// HEAD_DIM · 127 · 128 < 2^22.
const SUM_START: i32 = 1262485504i;
// Four field groups of a row each.
const ROW_QUADS: u32 = KEY_VECTORS * KEY_QUADS;
const QUERY_VECTORS: u32 = ROW_QUADS * 4u;
const QUERY_ROW: u32 = QUERY_VECTORS + 1u;
// Field groups of a lane, padding of the row of keys included.
const LANE_FIELDS: u32 = (QUERY_VECTORS + 31u) / 32u;

var<workgroup> query: array<vec4<f32>, HEADS * QUERY_VECTORS>;

// [tile of the step][group]: [head][quad], and a vector that keeps groups in banks of their own.
const GROUP_ROW: u32 = HEADS * ROW_QUADS + 1u;
const STEP_QUERY_VECTORS: u32 = STEP_TILES * KEY_TOKEN_GROUPS * GROUP_ROW;
// Σ q (m_g + 2^(bits-1) s_g) in units: [tile of the step][group][head].
var<workgroup> group_biases: array<f32, STEP_TILES * KEY_TOKEN_GROUPS * HEADS>;
// The value of one unit of the query's integers: [tile of the step][head].
var<workgroup> tile_units: array<f32, STEP_TILES * HEADS>;

// Ranges of four channels in a group of a tile. Channels past the head, in rows that do not fill a vector, are
// multiplied by a zero query: any range in bounds will do.
fn field_ranges(tile_base: u32, group: u32, field: u32) -> vec4<u32> {
    return key_ranges[(tile_base * KEY_TOKEN_GROUPS + group) * (HEAD_DIM / 4u) + min(field, HEAD_DIM / 4u - 1u)];
}

fn field_scales(ranges: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(ranges.x).x, unpack2x16float(ranges.y).x, unpack2x16float(ranges.z).x, unpack2x16float(ranges.w).x);
}

// m + 2^(bits-1) s.
fn field_middles(ranges: vec4<u32>, scales: vec4<f32>) -> vec4<f32> {
    let minima = vec4<f32>(unpack2x16float(ranges.x).y, unpack2x16float(ranges.y).y, unpack2x16float(ranges.z).y, unpack2x16float(ranges.w).y);
    return minima + KEY_MIDDLE * scales;
}

// The factor that turns q s into an integer, given the largest |q s|. If only smaller ones occur, scores are 0.
fn inverse_unit(largest: f32) -> f32 {
    return select(1f, QUERY_LARGEST / largest, largest > 1e-20f);
}

fn unit(largest: f32) -> f32 {
    return select(1f, largest / QUERY_LARGEST, largest > 1e-20f);
}

// Four channels as signed bytes, rounded to nearest in the low bits of 2^23 + 128 + integer. Shifting drops the bits of
// 2^23 except one byte, 75. Adding 181 wraps it around.
fn group_bytes(scaled: vec4<f32>) -> u32 {
    let x = bitcast<vec4<u32>>(scaled + vec4<f32>(8388736f, 8388736f, 8388736f, 8388917f));
    return (x.x + (x.y << 8u) + (x.z << 16u) + (x.w << 24u)) ^ 0x80808080u;
}

// Four channels of a head's query, 0 past the row.
fn query_field(head: u32, field: u32) -> vec4<f32> {
    return query[head * QUERY_VECTORS + min(field, QUERY_VECTORS - 1u)] * select(0f, 1f, field < QUERY_VECTORS);
}

// Converts the query to integers for the first step.
fn begin_keys(tiles: u32, team: u32, lane: u32) {
    make_query_bytes(0u, tiles, team, lane);
    workgroupBarrier();
}

// Converts the query to integers for the step of tiles that begins at `first`, if there is one.
fn make_query_bytes(first: u32, tiles: u32, team: u32, lane: u32) {
    if (first >= tiles) {
        return;
    }
    let tile_base = tile_bases[min(first + team, tiles - 1u)];
    // [field of the lane][group]
    var ranges: array<vec4<u32>, LANE_FIELDS * KEY_TOKEN_GROUPS>;
    var largest_scales: array<vec4<f32>, LANE_FIELDS>;
    // unroll
    for (var i = 0u; i < LANE_FIELDS; i++) {
        // unroll
        for (var group = 0u; group < KEY_TOKEN_GROUPS; group++) {
            ranges[i * KEY_TOKEN_GROUPS + group] = field_ranges(tile_base, group, i * 32u + lane);
        }
        largest_scales[i] = vec4<f32>(0f);
        // unroll
        for (var group = 0u; group < KEY_TOKEN_GROUPS; group++) {
            largest_scales[i] = max(largest_scales[i], field_scales(ranges[i * KEY_TOKEN_GROUPS + group]));
        }
    }
    enter_key_totals(tile_base, team, lane);
    // In units: [head][field of the lane].
    var q: array<vec4<f32>, HEADS * LANE_FIELDS>;
    var largest: array<f32, HEADS>;
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        largest[head] = 0f;
        // unroll
        for (var i = 0u; i < LANE_FIELDS; i++) {
            q[head * LANE_FIELDS + i] = query_field(head, i * 32u + lane);
            let magnitude = abs(q[head * LANE_FIELDS + i] * largest_scales[i]);
            largest[head] = max(largest[head], max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w)));
        }
        largest[head] = team_largest(largest[head], team, head);
        let inverse = inverse_unit(largest[head]);
        // unroll
        for (var i = 0u; i < LANE_FIELDS; i++) {
            q[head * LANE_FIELDS + i] *= inverse;
        }
    }
    // unroll
    for (var i = 0u; i < LANE_FIELDS; i++) {
        let field = i * 32u + lane;
        let at = place(field);
        // unroll
        for (var group = 0u; group < KEY_TOKEN_GROUPS; group++) {
            let scales = field_scales(ranges[i * KEY_TOKEN_GROUPS + group]);
            let middles = field_middles(ranges[i * KEY_TOKEN_GROUPS + group], scales);
            // unroll
            for (var head = 0u; head < HEADS; head++) {
                add_bias(i, group, head, dot(q[head * LANE_FIELDS + i], middles));
                if (field < QUERY_VECTORS) {
                    let row = (team * KEY_TOKEN_GROUPS + group) * GROUP_ROW + head * ROW_QUADS;
                    put_query_word(row + at / 4u, at % 4u, group_bytes(q[head * LANE_FIELDS + i] * scales));
                }
            }
        }
    }
    finish_key_totals(team, lane);
    // After all exchanges, so that no branch separates them.
    if (lane == 0u) {
        // unroll
        for (var head = 0u; head < HEADS; head++) {
            tile_units[team * HEADS + head] = unit(largest[head]);
        }
    }
}

fn key_pages() -> u32 {
    return arrayLength(&keys) / (KEY_VECTORS * TILE_TOKENS * KV_HEADS);
}

fn score_tile(item: WorkItem, tile: u32, lane: u32) {
    let tile_base = tile_bases[tile];
    let team = tile % STEP_TILES;
    // [head][token]
    var sums: array<i32, HEADS * LANE_TOKENS>;
    // unroll
    for (var i = 0u; i < HEADS * LANE_TOKENS; i++) {
        sums[i] = SUM_START;
    }
    let first = tile_base * (KEY_VECTORS * TILE_TOKENS);
    for (var first_vector = 0u; first_vector < KEY_VECTORS; first_vector += KEY_AHEAD) {
        var words: array<KeyVector, KEY_AHEAD * LANE_TOKENS>;
        // unroll
        for (var v = 0u; v < KEY_AHEAD; v++) {
            // unroll
            for (var i = 0u; i < LANE_TOKENS; i++) {
                words[v * LANE_TOKENS + i] = keys[first + (first_vector + v) * TILE_TOKENS + scored_token(lane, i)];
            }
        }
        // unroll
        for (var v = 0u; v < KEY_AHEAD; v++) {
            for (var quad = 0u; quad < KEY_QUADS; quad++) {
                var codes: array<u32, 16>;
                // unroll
                for (var f = 0u; f < 4u; f++) {
                    // unroll
                    for (var i = 0u; i < LANE_TOKENS; i++) {
                        codes[f * 4u + i] = key_bytes(words[v * LANE_TOKENS + i], quad, f);
                    }
                }
                // unroll
                for (var head = 0u; head < HEADS; head++) {
                    var q: array<vec4<u32>, LANE_GROUPS>;
                    // unroll
                    for (var n = 0u; n < LANE_GROUPS; n++) {
                        let row = (team * KEY_TOKEN_GROUPS + scored_group(lane, n)) * GROUP_ROW + head * ROW_QUADS;
                        q[n] = query_vector(row + (first_vector + v) * KEY_QUADS + quad);
                    }
                    // unroll
                    for (var i = 0u; i < LANE_TOKENS; i++) {
                        let at_sum = head * LANE_TOKENS + i;
                        let n = i * LANE_GROUPS / LANE_TOKENS;
                        // One addition of three operands for two products.
                        sums[at_sum] = sums[at_sum] + dot4I8Packed(codes[i], q[n].x) + dot4I8Packed(codes[4u + i], q[n].y);
                        sums[at_sum] = sums[at_sum] + dot4I8Packed(codes[8u + i], q[n].z) + dot4I8Packed(codes[12u + i], q[n].w);
                    }
                }
            }
        }
    }
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            let group = scored_group(lane, i * LANE_GROUPS / LANE_TOKENS);
            let sum = bitcast<f32>(sums[head * LANE_TOKENS + i]) - 12582912f;
            let bias = group_biases[(team * KEY_TOKEN_GROUPS + group) * HEADS + head];
            token_scores[head * LANE_TOKENS + i] = tile_units[team * HEADS + head] * (sum * CODE_UNIT + bias);
        }
        arrange_scores(head, lane);
    }
}

// -------- sketch --------

// Scores of keys with sign sketches (`format::sketch`) by integer dot products:
//
//   score = ρ level_s Σ q2 sign + norm unit Σ q1 (byte + 1/2)
//
// with the query q2 in the basis of the sketch, and q1 in that of the levels. At 1 bit there are no levels.
//
// The prepared query is KEY_PARTS rows per span and query head, the row of the signs first, each as in
// attend/step_scores.wgsl#dot. The top bit of a field is the sign, set below 0. The other bits are the code of a level.
//
// needs: HEADS, INVOCATIONS, KV_HEADS, LANE_TOKENS, TILE_TOKENS, WorkItem, prepared_row, tile_bases, token_scores
// gives: KeyVector, KEY_BITS, KEY_VECTOR, QUERY_PLANES, QUERY_VECTORS, QUERY_ROW, query, load_query, key_pages,
//   score_tile
// binds: 2 queries, 3 keys, 4 key_ranges
// set by plans: KeyVector, KEY_BITS, KEY_VECTOR, KEY_VECTORS, KEY_PARTS, LEVEL_UNIT, SKETCH_LEVEL, QUERY_PLANES

// import attend/codes.wgsl#level_bytes
// import sketch_fields = attend/sketch_fields.wgsl#planes

alias KeyVector = vec4<u32>;

@group(0) @binding(2) var<storage, read> queries: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> keys: array<KeyVector>;
// The row's norm, and the norm of the residual.
@group(0) @binding(4) var<storage, read> key_ranges: array<u32>;

const KEY_BITS: u32 = 4u;
// Words of a vector, and vectors of a token's row.
const KEY_VECTOR: u32 = 4u;
const KEY_VECTORS: u32 = 4u;

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

// -------- stored --------

// Scores that `scores` stored, calibrated: score' = slope · score + offset, one map per prepared query and query head.
//
// needs: HEADS, LANE_TOKENS, LOG2_E, QUERY_HEADS, TILE_TOKENS, WorkItem, query_head, token_scores
// gives: load_query, score_tile
// binds: 2 stored_scores, 3 extremes
// set by plans: TAU_1, TAU_2

// import common/ordered.wgsl#ordered

// Natural-log scores [query head][token], tile after tile. The tiles of an item follow its first one.
@group(0) @binding(2) var<storage, read> stored_scores: array<f32>;
// Largest score and largest negated score of every prepared query and query head, ordered.
@group(0) @binding(3) var<storage, read> extremes: array<vec2<u32>>;

const TAU_1: f32 = 0f;
const TAU_2: f32 = 0f;

// Slope and offset of every head, in units of log2.
var<private> score_maps: array<vec2<f32>, HEADS>;
var<private> score_rows: array<u32, HEADS>;

fn load_query(item: WorkItem, y: u32, invocation: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        let row = query_head(y, head);
        let extreme = extremes[min(item.query, arrayLength(&extremes) / QUERY_HEADS - 1u) * QUERY_HEADS + row];
        let largest = from_ordered(extreme.x);
        let smallest = -from_ordered(extreme.y);
        let low = smallest - TAU_1;
        // Equal scores (for example of a single token) all go to the lower end, because the formula would divide by
        // 1e-8.
        let spread = largest - smallest;
        let slope = select(max((largest - TAU_2 - low) / (spread + 1e-8f), 0f), 0f, spread == 0f);
        score_maps[head] = vec2<f32>(slope, low - slope * smallest) * LOG2_E;
        score_rows[head] = row;
    }
}

fn score_tile(item: WorkItem, tile: u32, lane: u32) {
    let first = min(item.scores + tile, arrayLength(&stored_scores) / (QUERY_HEADS * TILE_TOKENS) - 1u) * QUERY_HEADS;
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            let score = stored_scores[(first + score_rows[head]) * TILE_TOKENS + i * 32u + lane];
            token_scores[head * LANE_TOKENS + i] = score_maps[head].x * score + score_maps[head].y;
        }
    }
}
