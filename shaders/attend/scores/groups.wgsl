// Scores of packed keys with one range per channel and group of consecutive tokens, by integer dot products:
//
//   score = unit_g Σ round(q s_g / unit_g) c + Σ q (m_g + 2^(bits-1) s_g)
//
// The scales of a group go into the query, which becomes bytes anew for every quarter of a tile, 32 tokens: relative to
// the largest |q s_g| of the quarter, in the order of use (attend/query_fields.wgsl). A team does that for its next tile
// between the two barriers of a step, a lane for the field groups lane, lane + 32, ...
// The query lies in workgroup memory as one f32 row per head, scaled by log2(e) / √D. Keys: eight neighbouring lanes or
// more read neighbouring vectors, and make signed bytes of their fields (attend/key_bytes/).
//
// needs: HEADS, HEAD_DIM, KV_HEADS, LANE_TOKENS, STEP_TILES, TILE_TOKENS, WorkItem, tile_bases, token_scores
// gives: KeyVector, KEY_VECTOR, QUARTERS, QUERY_VECTORS, QUERY_ROW, query, group_totals, field_ranges, begin_keys,
//   prepare_keys, key_pages, score_tile
// binds: 3 keys, 4 key_ranges
// set by plans: KeyVector, KEY_VECTOR, KEY_VECTORS, KEY_TOKEN_GROUPS, KEY_MIDDLE

alias KeyVector = vec4<u32>;

@group(0) @binding(3) var<storage, read> keys: array<KeyVector>;
// Scale and minimum in f16: [tile][group of tokens][channel].
@group(0) @binding(4) var<storage, read> key_ranges: array<vec4<u32>>;

// Words of a vector, and vectors of a token's row.
const KEY_VECTOR: u32 = 4u;
const KEY_VECTORS: u32 = 4u;

// import key_bytes = attend/key_bytes/top.wgsl
// import attend/query_fields.wgsl

// Groups of tokens in a tile: 1, 2 or 4.
const KEY_TOKEN_GROUPS: u32 = 4u;
const KEY_MIDDLE: f32 = 8f;
// Sums start at the bits of 1.5 · 2^23 and are that float plus the sum: in magnitude a sum is at most
// HEAD_DIM · 127 · 128 < 2^22.
const SUM_START: i32 = 1262485504i;
const QUARTERS: u32 = 4u;
// Four field groups of a row each.
const ROW_QUADS: u32 = KEY_VECTORS * KEY_QUADS;
const QUERY_VECTORS: u32 = ROW_QUADS * 4u;
const QUERY_ROW: u32 = QUERY_VECTORS + 1u;
// Field groups of a lane, padding of the row of keys included.
const LANE_FIELDS: u32 = (QUERY_VECTORS + 31u) / 32u;

var<workgroup> query: array<vec4<f32>, HEADS * QUERY_VECTORS>;

// [tile of the step][quarter]: [head][quad], and a vector that keeps quarters in banks of their own.
const QUARTER_ROW: u32 = HEADS * ROW_QUADS + 1u;
var<workgroup> group_query: array<vec4<u32>, STEP_TILES * QUARTERS * QUARTER_ROW>;
// Largest |q s_g| and Σ q (m_g + 2^(bits-1) s_g): [tile of the step][quarter][head].
var<workgroup> group_totals: array<vec2<f32>, STEP_TILES * QUARTERS * HEADS>;

// import query = attend/query/prepared_f32.wgsl
// import key_totals = attend/key_totals/memory.wgsl

struct FieldRanges {
    scale: vec4<f32>,
    // m + 2^(bits-1) s.
    middle: vec4<f32>,
}

// Ranges of four channels in a quarter of a tile. Channels past the head, in rows that fill no vector, meet a zero
// query: any range in bounds will do.
fn field_ranges(tile_base: u32, quarter: u32, field: u32) -> FieldRanges {
    let group = tile_base * KEY_TOKEN_GROUPS + quarter * KEY_TOKEN_GROUPS / QUARTERS;
    let ranges = key_ranges[group * (HEAD_DIM / 4u) + min(field, HEAD_DIM / 4u - 1u)];
    let a = unpack2x16float(ranges.x);
    let b = unpack2x16float(ranges.y);
    let c = unpack2x16float(ranges.z);
    let d = unpack2x16float(ranges.w);
    let scale = vec4<f32>(a.x, b.x, c.x, d.x);
    return FieldRanges(scale, vec4<f32>(a.y, b.y, c.y, d.y) + KEY_MIDDLE * scale);
}

// Four channels as signed bytes relative to their largest, rounded to nearest in the low bits of 2^23 + 128 + integer.
fn group_bytes(scaled: vec4<f32>, largest: f32) -> u32 {
    let inverse = select(0f, QUERY_LARGEST / largest, largest > 1e-30f);
    let x = bitcast<vec4<u32>>(scaled * inverse + vec4<f32>(8388608f + 128f));
    // The bits of 2^23 fall off the top but for one byte.
    let whole = x.x + (x.y << 8u) + (x.z << 16u) + (x.w << 24u) - 1258291200u;
    return whole ^ 0x80808080u;
}

// Four channels of a head's query, 0 past the row.
fn query_field(head: u32, field: u32) -> vec4<f32> {
    return query[head * QUERY_VECTORS + min(field, QUERY_VECTORS - 1u)] * select(0f, 1f, field < QUERY_VECTORS);
}

// Makes integers of the query for the first step.
fn begin_keys(tiles: u32, team: u32, lane: u32) {
    prepare_keys(0u, tiles, team, lane);
    workgroupBarrier();
}

// Makes integers of the query for the step of tiles from `first` on, if there is one.
fn prepare_keys(first: u32, tiles: u32, team: u32, lane: u32) {
    if (first >= tiles) {
        return;
    }
    let tile_base = tile_bases[min(first + team, tiles - 1u)];
    var q: array<vec4<f32>, HEADS * LANE_FIELDS>;
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        // unroll
        for (var i = 0u; i < LANE_FIELDS; i++) {
            q[head * LANE_FIELDS + i] = query_field(head, i * 32u + lane);
        }
    }
    enter_key_totals(tile_base, team, lane);
    // unroll
    for (var quarter = 0u; quarter < QUARTERS; quarter++) {
        var ranges: array<FieldRanges, LANE_FIELDS>;
        // unroll
        for (var i = 0u; i < LANE_FIELDS; i++) {
            ranges[i] = field_ranges(tile_base, quarter, i * 32u + lane);
        }
        // unroll
        for (var head = 0u; head < HEADS; head++) {
            var largest = 0f;
            var bias = 0f;
            // unroll
            for (var i = 0u; i < LANE_FIELDS; i++) {
                let magnitude = abs(q[head * LANE_FIELDS + i] * ranges[i].scale);
                largest = max(largest, max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w)));
                bias += dot(q[head * LANE_FIELDS + i], ranges[i].middle);
            }
            largest = team_largest(largest, bias, (team * QUARTERS + quarter) * HEADS + head, quarter, head);
            // unroll
            for (var i = 0u; i < LANE_FIELDS; i++) {
                let field = i * 32u + lane;
                if (field < QUERY_VECTORS) {
                    let whole = group_bytes(q[head * LANE_FIELDS + i] * ranges[i].scale, largest);
                    let at = place(field);
                    group_query[(team * QUARTERS + quarter) * QUARTER_ROW + head * ROW_QUADS + at / 4u][at % 4u] = whole;
                }
            }
        }
    }
    finish_key_totals(team, lane);
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
    for (var vector = 0u; vector < KEY_VECTORS; vector++) {
        var words: array<KeyVector, LANE_TOKENS>;
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            words[i] = keys[first + vector * TILE_TOKENS + scored_token(lane, i)];
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
                var q: array<vec4<u32>, LANE_QUARTERS>;
                // unroll
                for (var n = 0u; n < LANE_QUARTERS; n++) {
                    let row = (team * QUARTERS + scored_quarter(lane, n)) * QUARTER_ROW + head * ROW_QUADS;
                    q[n] = group_query[row + vector * KEY_QUADS + quad];
                }
                // unroll
                for (var i = 0u; i < LANE_TOKENS; i++) {
                    let at_sum = head * LANE_TOKENS + i;
                    let n = i * LANE_QUARTERS / LANE_TOKENS;
                    // One addition of three operands for two products.
                    sums[at_sum] = sums[at_sum] + dot4I8Packed(codes[i], q[n].x) + dot4I8Packed(codes[4u + i], q[n].y);
                    sums[at_sum] = sums[at_sum] + dot4I8Packed(codes[8u + i], q[n].z) + dot4I8Packed(codes[12u + i], q[n].w);
                }
            }
        }
    }
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            let totals = group_totals[(team * QUARTERS + scored_quarter(lane, i * LANE_QUARTERS / LANE_TOKENS)) * HEADS + head];
            let sum = bitcast<f32>(sums[head * LANE_TOKENS + i]) - 12582912f;
            token_scores[head * LANE_TOKENS + i] = sum * (totals.x * (CODE_UNIT / QUERY_LARGEST)) + totals.y;
        }
        arrange_scores(head, lane);
    }
}
