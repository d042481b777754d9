// Scores of packed keys with one range per channel and group of consecutive tokens, by integer dot products:
//
//   score = unit (Σ round(q s_g / unit) c + Σ q (m_g + 2^(bits-1) s_g) / unit)
//
// The scales of a group are multiplied into the query, which is converted to bytes separately for every group of a
// tile, in the order of use (attend/query_fields.wgsl). The bytes are relative to the largest |q s_g| of the whole
// tile: that takes one maximum over the team per head, where separate units would take one per group. A team does this
// for its next tile between two barriers of a step (attend/query_bytes/); a lane takes the field groups lane, lane +
// 32, ... The query lies in workgroup memory as one f32 row per head, scaled by log2(e) / √D. Groups of eight
// neighbouring lanes or more read neighbouring vectors of keys and convert their fields to signed bytes
// (attend/key_bytes/).
//
// needs: HEADS, HEAD_DIM, KV_HEADS, LANE_TOKENS, STEP_TILES, TILE_TOKENS, WorkItem, tile_bases, token_scores
// gives: KeyVector, KEY_VECTOR, KEY_TOKEN_GROUPS, QUERY_VECTORS, QUERY_ROW, query, STEP_QUERY_VECTORS, group_biases,
//   field_ranges, field_scales, field_middles, inverse_unit, begin_keys, make_query_bytes, key_pages, score_tile
// binds: 3 keys, 4 key_ranges
// set by plans: KeyVector, KEY_VECTOR, KEY_VECTORS, KEY_AHEAD, KEY_TOKEN_GROUPS, KEY_MIDDLE

alias KeyVector = vec4<u32>;

@group(0) @binding(3) var<storage, read> keys: array<KeyVector>;
// Scale and minimum in f16: [tile][group of tokens][channel].
@group(0) @binding(4) var<storage, read> key_ranges: array<vec4<u32>>;

// Words of a vector, and vectors of a token's row.
const KEY_VECTOR: u32 = 4u;
const KEY_VECTORS: u32 = 4u;
// Vectors of a token that are loaded together. It divides the number of its vectors.
const KEY_AHEAD: u32 = 4u;

// import key_bytes = attend/key_bytes/top.wgsl
// import attend/query_fields.wgsl

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

// import query_bytes = attend/query_bytes/own.wgsl
// import query = attend/query/prepared_f32.wgsl
// import key_totals = attend/key_totals/memory.wgsl

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
