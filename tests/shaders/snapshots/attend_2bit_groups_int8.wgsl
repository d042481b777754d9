// ----------------------------------------------------------------------------------------------------
// shaders/attend/attend.wgsl
// ----------------------------------------------------------------------------------------------------

// attend: attention states of packed or f16 keys and values, fused and split over tokens.
//
//   s_t = q · k_t / √D (as prepared),  lse = ln Σ exp(s_t),  output = Σ exp(s_t - lse) v_t
//
// over the tokens of one work item, for one KV head and up to HEADS of its query heads. If keys are not rotated, the
// query is prepared here (query.wgsl#own, query.wgsl#own_f32). If there are few items, their states are merged here
// (attend/merge.wgsl#last). Otherwise `prepare_query` and `merge_states` do this.
//
// attend/work_item.wgsl describes the invocations, attend/softmax_loop.wgsl the loop, attend/step_scores.wgsl the keys,
// attend/values.wgsl and attend/products.wgsl#value_dots the values. Keys and values are read once per chunk of query
// heads, 16 bytes per lane, coalesced. Workgroup memory holds the query rows (and 16 rows of bytes per step and head
// where keys have ranges of groups, which may share the memory of the weights: attend/query_bytes.wgsl), the weights of
// one step, 512 · HEADS bytes for sums, and 8 · HEAD_DIM for ranges of values.
//
// In bounds: what items, page table and tables of states hold is clamped to what is bound, so that they may hold
// anything (docs/in-bounds.md); lanes beyond HEAD_DIM clamp their channel, teams without a tile read ranges of the
// last; local arrays have constant indices. An item has at least one tile, and at most MAX_TILES, which is at most
// INVOCATIONS. Loops are bounded by an item's tiles and a sequence's states. Divisors are constants, sums of weights,
// of which the largest is 1, or kept from 0.

@compute @workgroup_size(128)
fn attend(@builtin(workgroup_id) group: vec3<u32>, numbering: Numbering) {
    if (!has_item(group)) {
        return;
    }
    attend_item(item_of(group), group.x, number(numbering));
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/numbering.wgsl#subgroup
// ----------------------------------------------------------------------------------------------------

// Invocations numbered subgroup by subgroup. An aligned group of neighbours shares a subgroup that has at least as many
// lanes. Subgroups whose size divides that of the workgroup have been full wherever kernels have run. If they were not,
// results would be wrong, but nothing would be out of bounds.
//
// needs: INVOCATIONS
// gives: Numbering, number

struct Numbering {
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) size: u32,
    @builtin(subgroup_invocation_id) lane: u32,
}

fn number(numbering: Numbering) -> u32 {
    return (numbering.subgroup * numbering.size + numbering.lane) % INVOCATIONS;
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/work_item.wgsl
// ----------------------------------------------------------------------------------------------------

// A work item: a run of tiles of one span and some neighbouring queries, for one KV head and HEADS of the query heads
// that share it: all those of up to QUERIES queries, or, where QUERIES is 1, a chunk of one query's.
//
// Workgroup (y, x): item x (unless the slot `item_of` says otherwise), KV head y / CHUNKS, heads (y % CHUNKS) * HEADS onwards of its group. What reads the same
// keys and values starts together, and the items start in the order of the plan.
// 128 invocations form four teams of 32. A team owns one of the four tiles of a step; lane r of it owns the tile's
// tokens r, r + 32, r + 64, r + 96. (A team is a subgroup, or part of one, only where invocations are numbered by
// attend/numbering.wgsl#subgroup, as for shuffles and matrices; nothing else depends on how the device forms those.)
//
// Tables are read from memory that a caller may have written. What is read becomes an index only after it was
// clamped to what exists, here once for an item and where rows are addressed, so that no table, whatever it holds,
// leads out of bounds.
//
// needs: pages
// gives: WorkItem, items, page_table, TILE_TOKENS, INVOCATIONS, STEP_TILES, LANE_TOKENS, HEAD_DIM, KV_HEADS,
//   QUERY_HEADS, GROUP, QUERIES, HEADS, CHUNKS, MAX_TILES, LOG2_E, LN_2, LOWEST, tile_bases, token_scores, read_item,
//   read_tile_base, keep_tile_base, query_head, query_of, head_exists, input_row, prepared_row, set_scores_lowest
// binds: 0 items, 1 page_table
// set by plans: INVOCATIONS, HEAD_DIM, KV_HEADS, QUERY_HEADS, QUERIES, HEADS, CHUNKS, MAX_TILES

struct WorkItem {
    page_offset: u32,
    tokens: u32,
    // First of its prepared queries.
    query: u32,
    // Row of states of its first query, and from there to the next query's.
    state: u32,
    range_slot: u32,
    // First of its queries in the tensor.
    row: u32,
    first_state: u32,
    states: u32,
    queries: u32,
    stride: u32,
    // First tile of its stored scores; of a masked item, where its bits begin in the page table, or the tokens at its
    // beginning that are hidden.
    scores: u32,
    // Tokens at its end that the first query does not see; each further one sees one more. Read by `attend_run`, and
    // where workgroups take the queries of an item one by one.
    later: u32,
    // From `scores` of a query to that of the next.
    score_stride: u32,
}

@group(0) @binding(0) var<storage, read> items: array<WorkItem>;
@group(0) @binding(1) var<storage, read> page_table: array<u32>;

const TILE_TOKENS: u32 = 128u;
const INVOCATIONS: u32 = 128u;
const STEP_TILES: u32 = 4u;
const LANE_TOKENS: u32 = 4u;

const HEAD_DIM: u32 = 128u;
const KV_HEADS: u32 = 2u;
const QUERY_HEADS: u32 = 8u;
const GROUP: u32 = QUERY_HEADS / KV_HEADS;
// Most queries of an item.
const QUERIES: u32 = 1u;
// Heads of one workgroup, those of all its queries, and workgroups that share the query heads of a KV head.
const HEADS: u32 = 4u;
const CHUNKS: u32 = 1u;
// Most tiles of an item.
const MAX_TILES: u32 = 64u;

const LOG2_E: f32 = 1.4426950408889634f;
const LN_2: f32 = 0.6931471805599453f;
// The score of a token that does not exist: exp2 of it is 0 beside any real score.
const LOWEST: f32 = -1e30f;

// Tile index, in tiles from the start of the shard, of every tile of the item.
var<workgroup> tile_bases: array<u32, MAX_TILES>;

// Scores of the invocation's tokens, in units of log2: [head][token].
var<private> token_scores: array<f32, HEADS * LANE_TOKENS>;

// An item of at least one token and query, and at most MAX_TILES and QUERIES.
fn read_item(index: u32) -> WorkItem {
    var item = items[index];
    item.tokens = clamp(item.tokens, 1u, MAX_TILES * TILE_TOKENS);
    item.queries = clamp(item.queries, 1u, QUERIES);
    return item;
}

// An item starts with reads that do not depend on each other: of pages, queries and ranges. They are written without a
// branch, and nothing is stored before all are under way, so that it waits for the slowest and not for one
// after the other.

// The index of tile `invocation`, of the last tile where there is no such tile. MAX_TILES is at most INVOCATIONS.
fn read_tile_base(page_offset: u32, tiles: u32, kv_head: u32, invocation: u32) -> u32 {
    let page = page_table[min(page_offset + min(invocation, tiles - 1u), arrayLength(&page_table) - 1u)];
    return min(page, pages() - 1u) * KV_HEADS + kv_head;
}

fn keep_tile_base(tile_base: u32, tiles: u32, invocation: u32) {
    if (invocation < tiles) {
        tile_bases[invocation] = tile_base;
    }
}

// Query head of head `head` of the workgroup. The last chunk of a group may be short, and an item may have fewer
// queries than others; surplus heads repeat the last one and write nothing.
fn query_head(y: u32, head: u32) -> u32 {
    return y / CHUNKS * GROUP + min(y % CHUNKS * HEADS + head % GROUP, GROUP - 1u);
}

// Which of the item's queries it is of.
fn query_of(item: WorkItem, head: u32) -> u32 {
    return min(head / GROUP, item.queries - 1u);
}

fn head_exists(item: WorkItem, y: u32, head: u32) -> bool {
    return y % CHUNKS * HEADS + head % GROUP < GROUP && head / GROUP < item.queries;
}

// Its row of the queries, [row][query head].
fn input_row(item: WorkItem, y: u32, head: u32) -> u32 {
    return (item.row + query_of(item, head)) * QUERY_HEADS + query_head(y, head);
}

// Its row of the prepared queries, [prepared query][query head].
fn prepared_row(item: WorkItem, y: u32, head: u32) -> u32 {
    return (item.query + query_of(item, head)) * QUERY_HEADS + query_head(y, head);
}

fn set_scores_lowest() {
    // unroll
    for (var i = 0u; i < HEADS * LANE_TOKENS; i++) {
        token_scores[i] = LOWEST;
    }
}

// Of attend/item_of.wgsl, by default:

// False for a workgroup without queries, which then does nothing.
fn has_item(group: vec3<u32>) -> bool {
    return true;
}

fn item_of(group: vec3<u32>) -> WorkItem {
    return read_item(group.y);
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/step_scores.wgsl#groups
// ----------------------------------------------------------------------------------------------------

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

alias KeyVector = vec4<u32>;

@group(0) @binding(3) var<storage, read> keys: array<KeyVector>;
// Scale and minimum in f16: [tile][group of tokens][channel].
@group(0) @binding(4) var<storage, read> key_ranges: array<vec4<u32>>;

// Words of a vector, and vectors of a token's row.
const KEY_VECTOR: u32 = 4u;
const KEY_VECTORS: u32 = 2u;
// Vectors of a token that are loaded together. It divides the number of its vectors.
const KEY_AHEAD: u32 = 2u;

// Groups of tokens in a tile: 1, 2 or 4.
const KEY_TOKEN_GROUPS: u32 = 4u;
const KEY_MIDDLE: f32 = 2.0f;
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

// Called before the second barrier of a step. Prepares those of the next step, whose first tile is `first`.
fn prepare_keys(first: u32, tiles: u32, team: u32, lane: u32) {}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/key_bytes.wgsl#top
// ----------------------------------------------------------------------------------------------------

// Signed bytes of a field group of keys, affine codes. A field shifted to the top of its byte is the signed code times
// 2^(8-bits). The scale compensates for this factor.
//
// needs: KEY_VECTOR, KeyVector
// gives: KEY_BITS, KEY_PLANES, KEY_QUADS, key_bytes
// set by plans: KEY_BITS, KEY_MASK

const KEY_BITS: u32 = 2u;
// The top KEY_BITS bits of every byte.
const KEY_MASK: u32 = 3233857728u;
const KEY_PLANES: u32 = 8u / KEY_BITS;
// Sets of four field groups in a vector: KEY_VECTOR words of the top bit plane, then of the one below.
const KEY_QUADS: u32 = KEY_VECTOR * KEY_PLANES / 4u;

fn key_bytes(words: KeyVector, quad: u32, f: u32) -> u32 {
    return (words[f % KEY_VECTOR] << ((quad * (4u / KEY_VECTOR) + f / KEY_VECTOR) * KEY_BITS)) & KEY_MASK;
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/prepared_query.wgsl#query_fields
// ----------------------------------------------------------------------------------------------------

// A query as integers: QUERY_PLANES byte planes of field-group words, low byte first, both signed. Integers span
// ±QUERY_LARGEST: 127 in one plane, 32639 in two, so that both bytes stay signed.
//
// gives: QUERY_LARGEST, CODE_UNIT, place, integers, bytes, high_bytes
// set by plans: QUERY_LARGEST, CODE_UNIT, PLACE_WORDS, PLACE_PLANES

const QUERY_LARGEST: f32 = 127.0f;
// Factor of a dot product of integers and key bytes, in addition to the query's own scale: 2^(bits-8) for affine codes,
// which are shifted to the top of their bytes, and the unit of a codebook's levels.
const CODE_UNIT: f32 = 0.015625f;
// Words of a vector of keys, and bit planes of a word; a vector of 3-bit codes counts as one word of eight planes.
const PLACE_WORDS: u32 = 4u;
const PLACE_PLANES: u32 = 4u;

// Field groups in the order in which `scores` and `attend` use them: within a vector of words, bit plane by bit plane
// from the top.
fn place(field: u32) -> u32 {
    let in_vector = field % (PLACE_WORDS * PLACE_PLANES);
    return field - in_vector + (PLACE_PLANES - 1u - in_vector % PLACE_PLANES) * PLACE_WORDS + in_vector / PLACE_PLANES;
}

fn integers(scaled: vec4<f32>, largest: f32) -> vec4<i32> {
    if (largest > 0f) {
        return vec4<i32>(round(scaled * (QUERY_LARGEST / largest)));
    }
    return vec4<i32>(0i);
}

fn bytes(x: vec4<i32>) -> u32 {
    let b = vec4<u32>(x) & vec4<u32>(255u);
    return b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
}

// The byte plane above that of `bytes`.
fn high_bytes(x: vec4<i32>) -> u32 {
    return bytes((x + vec4<i32>(128i)) >> vec4<u32>(8u));
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/query_bytes.wgsl#of_weights
// ----------------------------------------------------------------------------------------------------

// Query bytes in the memory of a step's weights. Scores are computed before a step has weights, and the bytes of the
// next step once its values are added. That takes two extra barriers per step, and two thirds of the workgroup memory.
//
// needs: make_query_bytes, weight_bytes
// gives: put_query_word, query_vector, prepare_keys_late

fn put_query_word(vector: u32, word: u32, bytes: u32) {
    weight_bytes[vector][word] = bytes;
}

fn query_vector(vector: u32) -> vec4<u32> {
    return weight_bytes[vector];
}

fn prepare_keys_late(first: u32, tiles: u32, team: u32, lane: u32) {
    if (first >= tiles) {
        return;
    }
    workgroupBarrier();
    make_query_bytes(first, tiles, team, lane);
    workgroupBarrier();
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/query.wgsl#own_f32
// ----------------------------------------------------------------------------------------------------

// The given query, scaled. Every workgroup prepares that of its own heads.
//
// needs: HEADS, HEAD_DIM, INVOCATIONS, QUERY_VECTORS, WorkItem, input_row, query
// gives: load_query
// set by plans: SCORE_SCALE

// log2(e) / √D.
const SCORE_SCALE: f32 = 0.12751743f;

// Vectors of an invocation.
const OWN_VECTORS: u32 = (HEADS * QUERY_VECTORS + INVOCATIONS - 1u) / INVOCATIONS;

fn load_query(item: WorkItem, y: u32, invocation: u32) {
    var own: array<vec4<f32>, OWN_VECTORS>;
    // unroll
    for (var i = 0u; i < OWN_VECTORS; i++) {
        let at = min(i * INVOCATIONS + invocation, HEADS * QUERY_VECTORS - 1u);
        let row = input_row(item, y, at / QUERY_VECTORS);
        let field = at % QUERY_VECTORS;
        // Channels past HEAD_DIM are padding of the row of keys.
        own[i] = input4(row * (HEAD_DIM / 4u) + min(field, HEAD_DIM / 4u - 1u)) * select(0f, SCORE_SCALE, field < HEAD_DIM / 4u);
    }
    // unroll
    for (var i = 0u; i < OWN_VECTORS; i++) {
        if (i * INVOCATIONS + invocation < HEADS * QUERY_VECTORS) {
            query[i * INVOCATIONS + invocation] = own[i];
        }
    }
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/input.wgsl#f16
// ----------------------------------------------------------------------------------------------------

// A dense f16 tensor, read four elements at a time.
//
// gives: input4
// binds: 2 inputs

@group(0) @binding(2) var<storage, read> inputs: array<vec2<u32>>;

fn input4(index: u32) -> vec4<f32> {
    let words = inputs[min(input_at(index), arrayLength(&inputs) - 1u)];
    return without_infinities(vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)));
}

// Of attend/input_rows.wgsl, by default:

fn input_at(index: u32) -> u32 {
    return index;
}

// ----------------------------------------------------------------------------------------------------
// shaders/common/ordered.wgsl#infinities #ordered #larger
// ----------------------------------------------------------------------------------------------------

// NaN in place of infinities. All scores of an infinite query may be minus infinity, as if it saw no token.
//
// gives: without_infinities

fn without_infinities(x: vec4<f32>) -> vec4<f32> {
    let bits = bitcast<vec4<u32>>(x);
    let exponent = vec4<u32>(0x7f800000u);
    return bitcast<vec4<f32>>(select(bits, bits | vec4<u32>(0x00400000u), (bits & exponent) == exponent));
}

// Maps floats to unsigned integers of the same order, so that atomics can compare them. 0 lies below every float.
//
// gives: ordered, from_ordered

fn ordered(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    return select(bits | 0x80000000u, ~bits, bits >= 0x80000000u);
}

fn from_ordered(bits: u32) -> f32 {
    return bitcast<f32>(select(~bits, bits ^ 0x80000000u, bits >= 0x80000000u));
}

// The larger of two numbers, or NaN if one is: `max` may drop NaN.
//
// gives: is_nan, larger

fn is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}

fn larger(a: f32, b: f32) -> f32 {
    return select(a, b, b > a || is_nan(b));
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/key_totals.wgsl#subgroup
// ----------------------------------------------------------------------------------------------------

// The largest scaled query of a tile and head and the constant part of the scores of every group, by reductions over
// the team: invocations are numbered subgroup by subgroup (see attend/numbering.wgsl#subgroup), and subgroups have 32
// lanes. A lane scores four tokens of one group, so that it meets one query per head. Where a tile has several groups
// it hands the scores to the lanes that own the tokens: 32 · quarter + 8 i + j is scored by lane 8 · quarter + j, as
// its token quarter ^ i, and owned by lane 8 i + j.
//
// needs: HEADS, KEY_TOKEN_GROUPS, LANE_TOKENS, group_biases, token_scores
// gives: LANE_GROUPS, scored_group, scored_token, arrange_scores, add_bias, team_largest, finish_key_totals

// Each team scores a tile of its own, or none. A team is a subgroup, so that branch is the same for all of its lanes.
// The compiler of a browser cannot see this, so the next line is turned into a directive for it:
//
// diagnostic(off, subgroup_uniformity);

// Groups that the tokens of a lane lie in.
const LANE_GROUPS: u32 = 1u;

// Each lane's part: [group][head].
var<private> biases: array<f32, KEY_TOKEN_GROUPS * HEADS>;

fn scored_group(lane: u32, n: u32) -> u32 {
    return lane / 8u * KEY_TOKEN_GROUPS / 4u;
}

fn scored_token(lane: u32, i: u32) -> u32 {
    return select(lane / 8u * 32u + ((lane / 8u) ^ i) * 8u + lane % 8u, i * 32u + lane, KEY_TOKEN_GROUPS == 1u);
}

// Four lanes, 8 apart, exchange four scores each. Score i goes to the lane whose number differs by 8 i. That lane takes
// it for its token of the quarter that differs from its own by i.
fn arrange_scores(head: u32, lane: u32) {
    if (KEY_TOKEN_GROUPS == 1u) {
        return;
    }
    let a = token_scores[head * LANE_TOKENS];
    let b = subgroupShuffleXor(token_scores[head * LANE_TOKENS + 1u], 8u);
    let c = subgroupShuffleXor(token_scores[head * LANE_TOKENS + 2u], 16u);
    let d = subgroupShuffleXor(token_scores[head * LANE_TOKENS + 3u], 24u);
    let odd = (lane & 8u) != 0u;
    let upper = (lane & 16u) != 0u;
    let ab = select(a, b, odd);
    let ba = select(b, a, odd);
    let cd = select(c, d, odd);
    let dc = select(d, c, odd);
    token_scores[head * LANE_TOKENS] = select(ab, cd, upper);
    token_scores[head * LANE_TOKENS + 1u] = select(ba, dc, upper);
    token_scores[head * LANE_TOKENS + 2u] = select(cd, ab, upper);
    token_scores[head * LANE_TOKENS + 3u] = select(dc, ba, upper);
}

fn add_bias(i: u32, group: u32, head: u32, part: f32) {
    biases[group * HEADS + head] = select(biases[group * HEADS + head] + part, part, i == 0u);
}

fn team_largest(own: f32, team: u32, head: u32) -> f32 {
    // Bits of floats that are not negative are ordered.
    return bitcast<f32>(subgroupMax(bitcast<u32>(own)));
}

// Number of sums that remain after every exchange of halves.
const BIASES: u32 = KEY_TOKEN_GROUPS * HEADS;
const BIASES_1: u32 = (BIASES + 1u) / 2u;
const BIASES_2: u32 = (BIASES_1 + 1u) / 2u;
const BIASES_3: u32 = (BIASES_2 + 1u) / 2u;
const BIASES_4: u32 = (BIASES_3 + 1u) / 2u;
const BIASES_5: u32 = (BIASES_4 + 1u) / 2u;

// Of two sums the lane keeps the first, and the lane `apart` from it keeps the second. Each adds the other's part of
// its sum. Without a second sum, half of the lanes keep none.
fn exchanged(a: f32, b: f32, lane: u32, apart: u32) -> f32 {
    let odd = (lane & apart) != 0u;
    return select(a, b, odd) + subgroupShuffleXor(select(b, a, odd), apart);
}

// Sums all biases over the lanes. After five exchanges of halves a lane has one of them or none.
fn finish_key_totals(team: u32, lane: u32) {
    // unroll
    for (var i = 0u; i < BIASES_1; i++) {
        biases[i] = exchanged(biases[i], select(0f, biases[min(i + BIASES_1, BIASES - 1u)], i + BIASES_1 < BIASES), lane, 1u);
    }
    // unroll
    for (var i = 0u; i < BIASES_2; i++) {
        biases[i] = exchanged(biases[i], select(0f, biases[min(i + BIASES_2, BIASES_1 - 1u)], i + BIASES_2 < BIASES_1), lane, 2u);
    }
    // unroll
    for (var i = 0u; i < BIASES_3; i++) {
        biases[i] = exchanged(biases[i], select(0f, biases[min(i + BIASES_3, BIASES_2 - 1u)], i + BIASES_3 < BIASES_2), lane, 4u);
    }
    // unroll
    for (var i = 0u; i < BIASES_4; i++) {
        biases[i] = exchanged(biases[i], select(0f, biases[min(i + BIASES_4, BIASES_3 - 1u)], i + BIASES_4 < BIASES_3), lane, 8u);
    }
    // unroll
    for (var i = 0u; i < BIASES_5; i++) {
        biases[i] = exchanged(biases[i], select(0f, biases[min(i + BIASES_5, BIASES_4 - 1u)], i + BIASES_5 < BIASES_4), lane, 16u);
    }
    // The index of that sum, from the last exchange to the first.
    let at_4 = lane / 16u % 2u * BIASES_5;
    let at_3 = at_4 + lane / 8u % 2u * BIASES_4;
    let at_2 = at_3 + lane / 4u % 2u * BIASES_3;
    let at_1 = at_2 + lane / 2u % 2u * BIASES_2;
    let at = at_1 + lane % 2u * BIASES_1;
    if (at_4 < BIASES_4 && at_3 < BIASES_3 && at_2 < BIASES_2 && at_1 < BIASES_1 && at < BIASES) {
        group_biases[team * BIASES + at] = biases[0];
    }
}

// Called first.
fn enter_key_totals(tile_base: u32, team: u32, lane: u32) {}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/softmax_loop.wgsl
// ----------------------------------------------------------------------------------------------------

// The loop that `attend` and `weighted_values` share: online softmax of the scores of a work item and the weighted sum
// of its values. Two barriers per step of four tiles (512 tokens), and what `prepare_keys_late` has:
//
//   scores of the own tile -> maximum over the step | weights p = exp2(score - maximum) -> workgroup memory | values
//
// Scores are in units of log2. The running sum of weights is kept by every invocation for its own tokens. A step's sums
// of values are made relative to the *step's* maximum, or to that of a part of it, and enter the running sums through
// exp2(that maximum - running maximum): weights are integers where values are packed, and an integer relative to a
// running maximum would lose everything beside one large score.
//
// needs: CHUNKS, HEADS, INVOCATIONS, LANE_TOKENS, LN_2, LOWEST, STEP_TILES, TILE_TOKENS, WorkItem, begin_keys,
//   keep_tile_base, key_pages, load_query, prepare_keys, prepare_keys_late, read_tile_base, score_tile,
//   set_scores_lowest, tile_bases, token_scores
// gives: sum_parts, weight_sum, rescale_acc, rescale_step, pages, attend_item, finish_sums, write_lse

// Maxima of the step, by head: two sets, so that one can be reset while the other is in use.
var<workgroup> step_maxima: array<atomic<u32>, 2u * HEADS>;
// Running maxima, by head: the set that a step reads, and the one that it writes.
var<workgroup> running_maxima: array<f32, 2u * HEADS>;
var<workgroup> sum_parts: array<f32, HEADS * INVOCATIONS>;

var<private> last_parity: u32;
var<private> weight_sum: array<f32, HEADS>;
// What running sums are multiplied with, and what the step's sums are multiplied with, to be relative to the new
// running maximum.
var<private> rescale_acc: array<f32, HEADS>;
var<private> rescale_step: array<f32, HEADS>;

// Pages of which all parts exist.
fn pages() -> u32 {
    return min(key_pages(), value_pages());
}

fn attend_item(item: WorkItem, y: u32, invocation: u32) {
    let lane = invocation % 32u;
    let team = invocation / 32u;
    let tiles = (item.tokens + TILE_TOKENS - 1u) / TILE_TOKENS;

    let tile_base = read_tile_base(item.page_offset, tiles, y / CHUNKS, invocation);
    read_output_ranges(item.range_slot, y / CHUNKS, invocation);
    load_query(item, y, invocation);
    keep_tile_base(tile_base, tiles, invocation);
    prepare_workgroup_max();
    if (invocation < 2u * HEADS) {
        atomicStore(&step_maxima[invocation], 0u);
        running_maxima[invocation] = LOWEST;
    }
    begin_values(invocation);
    workgroupBarrier();
    begin_keys(tiles, team, lane);

    var parity = 0u;
    for (var first = 0u; first < tiles; first += STEP_TILES) {
        score_own_tile(item, first + team, tiles, lane);
        if (first == 0u) {
            begin_weight_sums();
        }
        // unroll
        for (var head = 0u; head < HEADS; head++) {
            let own = own_reference(head);
            enter_block_max(head, own, parity, team, lane);
            let entered = largest_to_enter(ordered(own));
            if (enters()) {
                atomicMax(&step_maxima[parity * HEADS + head], entered);
            }
        }
        enter_value_ranges(parity, team, lane);
        workgroupBarrier();

        // unroll
        for (var head = 0u; head < HEADS; head++) {
            let step_max = from_ordered(atomicLoad(&step_maxima[parity * HEADS + head]));
            let old_max = running_maxima[parity * HEADS + head];
            let new_max = max(old_max, step_max);
            rescale_acc[head] = exp2(old_max - new_max);
            rescale_step[head] = exp2(step_max - new_max);
            if (invocation == head) {
                running_maxima[(1u - parity) * HEADS + head] = new_max;
            }
            weight_sum[head] = weight_sum[head] * rescale_acc[head] + weigh(head, step_max, new_max, parity, team, lane);
        }
        if (invocation < HEADS) {
            atomicStore(&step_maxima[(1u - parity) * HEADS + invocation], 0u);
        }
        store_weights(team, lane, parity);
        prepare_keys(first + STEP_TILES, tiles, team, lane);
        workgroupBarrier();

        add_values(first, tiles, team, lane);
        prepare_keys_late(first + STEP_TILES, tiles, team, lane);
        parity = 1u - parity;
    }
    finish_sums(invocation);
    last_parity = parity;
    write_states(item, y, team, lane, invocation);
    merge_item(item, y, invocation);
}

// Sums of weights begin with NaN if the query holds NaN: every score is NaN then. Integers and maxima may lose it.
fn begin_weight_sums() {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        let at = head * LANE_TOKENS;
        let sum = token_scores[at] + token_scores[at + 1u] + token_scores[at + 2u] + token_scores[at + 3u];
        weight_sum[head] = select(0f, sum, is_nan(sum));
    }
}

fn score_own_tile(item: WorkItem, tile: u32, tiles: u32, lane: u32) {
    if (tile >= tiles) {
        set_scores_lowest();
        skip_value_ranges();
        return;
    }
    score_tile(item, tile, lane);
    finish_scores(item, tile, lane);
    load_value_ranges(tile_bases[tile], lane);
    if (tile * TILE_TOKENS + TILE_TOKENS <= item.tokens) {
        return;
    }
    // unroll
    for (var i = 0u; i < LANE_TOKENS; i++) {
        if (tile * TILE_TOKENS + i * 32u + lane >= item.tokens) {
            skip_value_range(i);
            // unroll
            for (var head = 0u; head < HEADS; head++) {
                token_scores[head * LANE_TOKENS + i] = LOWEST;
            }
        }
    }
}

// Lists in which the parts of a head are summed first.
const SUM_LISTS: u32 = 16u;

// Sums `count` parts of every list of a head, which lie `lists` apart, into the list's first.
fn add_parts(invocation: u32, lists: u32, count: u32) {
    for (var i = invocation; i < HEADS * lists; i += INVOCATIONS) {
        let first = i / lists * INVOCATIONS + i % lists;
        var sum = 0f;
        for (var part = 0u; part < count; part++) {
            sum += sum_parts[first + part * lists];
        }
        sum_parts[first] = sum;
    }
}

// Leaves the sum of all weights of a head in its first `sum_parts`.
fn finish_sums(invocation: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        sum_parts[head * INVOCATIONS + invocation] = weight_sum[head];
    }
    workgroupBarrier();
    add_parts(invocation, SUM_LISTS, INVOCATIONS / SUM_LISTS);
    workgroupBarrier();
    add_parts(invocation, 1u, SUM_LISTS);
    workgroupBarrier();
}

// Writes the log-sum-exp of a head, whose weights sum up to `total`.
fn write_lse(item: WorkItem, y: u32, head: u32, total: f32, invocation: u32) {
    if (invocation == 0u) {
        // `log2` of NaN is a number on some devices.
        let lse = (running_maxima[last_parity * HEADS + head] + log2(total)) * LN_2;
        write_state_lse(item, y, head, select(lse, total, is_nan(total)));
    }
}

// Of attend/logits.wgsl, by default:

fn finish_scores(item: WorkItem, tile: u32, lane: u32) {}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/workgroup_max.wgsl#subgroup
// ----------------------------------------------------------------------------------------------------

// Largest value over the workgroup. The first invocation of every subgroup contributes the subgroup's maximum to an
// atomic maximum.
//
// gives: prepare_workgroup_max, largest_to_enter, enters

var<private> first_of_subgroup: bool;

fn prepare_workgroup_max() {
    first_of_subgroup = subgroupExclusiveAdd(1u) == 0u;
}

fn largest_to_enter(value: u32) -> u32 {
    return subgroupMax(value);
}

fn enters() -> bool {
    return first_of_subgroup;
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/values.wgsl#byte
// ----------------------------------------------------------------------------------------------------

// Weighted sum of packed values with integer dot products, with weights of one byte.
//
// A weight is an integer 0 … 255 relative to the largest weight of its *block*: 32 tokens, four in each of the eight
// lanes whose field groups form two quads that are used one after the other. The sum of a block is folded into f32 with
// the block's scale, exp2(block's maximum - running maximum). A large score therefore coarsens the weights of only the
// 31 other tokens. If channels share their weights, the sum of weights is that of the integers: the mean of the values
// is exact, and only deviations from it carry the error of the weights.
//
// Bytes are made unsigned for the unsigned dot product by adding 128. A block's sum is at most 32 · 255 · 255 < 2^23.
// It therefore starts at the bits of 2^23 and equals that float plus the sum.
//
// needs: HEADS, HEAD_DIM, STEP_TILES, begin_block_maxima, begin_value_ranges, channel_scale, enter_block,
//   enter_value_tile, leave_value_tile, rescale_acc, tile_bases
// gives: TILE_QUAD_PAIRS, BLOCK_STRIDE, TWO_TO_23, LARGEST_WEIGHT_UNIT, WEIGHT_GROUPS, GROUP_CHANNELS, weight_bytes,
//   is_first_of_block, begin_values, store_bytes, add_values
// set by plans: WEIGHT_GROUPS, LEAST_WEIGHT_VECTORS

// Quad pairs of a tile.
const TILE_QUAD_PAIRS: u32 = 4u;
// Lanes l, l ^ 1, l ^ BLOCK_STRIDE, l ^ 2 BLOCK_STRIDE and their combinations are a block. VALUE_QUADS, but at least 2.
const BLOCK_STRIDE: u32 = (VALUE_QUADS + 1u) / 2u * 2u;
// The fewest vectors that hold whole pairs, and their pairs.
const PAIR_VECTORS: u32 = (VALUE_QUADS + 1u) / VALUE_QUADS;
const VECTOR_PAIRS: u32 = (VALUE_QUADS + 1u) / 2u;

const TWO_TO_23: u32 = 1258291200u;
const LARGEST_WEIGHT_UNIT: f32 = 1f / 255f;
// Factor of a sum of integer weights times bytes.
const WEIGHT_UNIT: f32 = 1f / VALUE_BYTE;

// Groups of channels with weights of their own, and channels of a group.
const WEIGHT_GROUPS: u32 = 4u;
const GROUP_CHANNELS: u32 = HEAD_DIM / WEIGHT_GROUPS;

// [group of channels][head][tile of the step][quad], four field groups each, in the order of use. Groups lie in banks
// of their own.
const GROUP_BYTES: u32 = HEADS * STEP_TILES * 8u + WEIGHT_GROUPS / 2u;
// Number of vectors that another use of this memory needs (attend/query_bytes.wgsl#of_weights).
const LEAST_WEIGHT_VECTORS: u32 = 528u;
const WEIGHT_VECTORS: u32 = max(WEIGHT_GROUPS * GROUP_BYTES, LEAST_WEIGHT_VECTORS);
var<workgroup> weight_bytes: array<vec4<u32>, WEIGHT_VECTORS>;
// [group of channels][tile of the step][quad pair][head]
const GROUP_SCALES: u32 = STEP_TILES * TILE_QUAD_PAIRS * HEADS;
var<workgroup> block_scales: array<f32, WEIGHT_GROUPS * GROUP_SCALES>;

// The group of the lane's channels.
fn weight_group(team: u32, lane: u32) -> u32 {
    return select(0u, own_channel(team, lane, 0u) / GROUP_CHANNELS, WEIGHT_GROUPS > 1u);
}

fn is_first_of_block(lane: u32) -> bool {
    return (lane & (3u * BLOCK_STRIDE + 1u)) == 0u;
}

fn begin_values(invocation: u32) {
    begin_block_maxima(invocation);
    // unroll
    for (var i = 0u; i < HEADS * CHANNELS; i++) {
        sums[i] = 0f;
    }
    begin_value_ranges(invocation);
}

// Stores the four weights of the invocation and, once per block, the value of a weight of 1.
fn store_bytes(group: u32, head: u32, team: u32, lane: u32, bytes: u32, scale: f32) {
    let place = value_place(lane);
    weight_bytes[group * GROUP_BYTES + (head * STEP_TILES + team) * 8u + place.x][place.y] = bytes;
    if (is_first_of_block(lane)) {
        block_scales[group * GROUP_SCALES + (team * TILE_QUAD_PAIRS + place.x / 2u) * HEADS + head] = scale * WEIGHT_UNIT;
    }
}

fn add_values(first: u32, tiles: u32, team: u32, lane: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        // unroll
        for (var k = 0u; k < CHANNELS; k++) {
            sums[head * CHANNELS + k] *= rescale_acc[head];
        }
    }
    let group = weight_group(team, lane);
    let first_tile = team / CHANNEL_BLOCKS * CHANNEL_BLOCKS;
    let end_tile = min(first_tile + CHANNEL_BLOCKS, tiles - first);
    for (var tile = first_tile; tile < end_tile; tile++) {
        let base = tile_bases[first + tile] * (VALUE_VECTORS * HEAD_DIM);
        enter_value_tile(tile_bases[first + tile], team, lane);
        for (var first_vector = 0u; first_vector < VALUE_VECTORS; first_vector += PAIR_VECTORS) {
            var words: array<ValueVector, PAIR_VECTORS * CHANNELS>;
            // unroll
            for (var v = 0u; v < PAIR_VECTORS; v++) {
                // unroll
                for (var k = 0u; k < CHANNELS; k++) {
                    words[v * CHANNELS + k] = unsigned_words(values[base + (first_vector + v) * HEAD_DIM + min(own_channel(team, lane, k), HEAD_DIM - 1u)]);
                }
            }
            for (var in_vectors = 0u; in_vectors < VECTOR_PAIRS; in_vectors++) {
                let pair = first_vector / PAIR_VECTORS * VECTOR_PAIRS + in_vectors;
                var pair_sums: array<u32, HEADS * CHANNELS>;
                // unroll
                for (var i = 0u; i < HEADS * CHANNELS; i++) {
                    pair_sums[i] = TWO_TO_23;
                }
                // unroll
                for (var q = 0u; q < 2u; q++) {
                    var codes: array<u32, 4u * CHANNELS>;
                    // unroll
                    for (var f = 0u; f < 4u; f++) {
                        // unroll
                        for (var k = 0u; k < CHANNELS; k++) {
                            codes[f * CHANNELS + k] = unsigned_bytes(words[q * (PAIR_VECTORS - 1u) * CHANNELS + k], (in_vectors * 2u + q) % VALUE_QUADS, f);
                        }
                    }
                    // unroll
                    for (var head = 0u; head < HEADS; head++) {
                        let w = weight_bytes[group * GROUP_BYTES + (head * STEP_TILES + tile) * 8u + pair * 2u + q];
                        // unroll
                        for (var k = 0u; k < CHANNELS; k++) {
                            let at = head * CHANNELS + k;
                            // One addition of three operands for two products.
                            pair_sums[at] = pair_sums[at] + dot4U8Packed(codes[k], w.x) + dot4U8Packed(codes[CHANNELS + k], w.y);
                            pair_sums[at] = pair_sums[at] + dot4U8Packed(codes[2u * CHANNELS + k], w.z) + dot4U8Packed(codes[3u * CHANNELS + k], w.w);
                        }
                    }
                }
                // unroll
                for (var head = 0u; head < HEADS; head++) {
                    let scale = block_scales[group * GROUP_SCALES + (tile * TILE_QUAD_PAIRS + pair) * HEADS + head];
                    enter_block(tile, pair, head, scale);
                    // unroll
                    for (var k = 0u; k < CHANNELS; k++) {
                        sums[head * CHANNELS + k] += (bitcast<f32>(pair_sums[head * CHANNELS + k]) - 8388608f) * (scale * channel_scale(k));
                    }
                }
            }
        }
        leave_value_tile();
    }
}

// Called with the first reads of an item. Reads the ranges that its outputs are scaled with.
fn read_output_ranges(range_slot: u32, kv_head: u32, invocation: u32) {}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/products.wgsl#value_dots
// ----------------------------------------------------------------------------------------------------

// The common part of the two weighted sums of packed values with integer dot products: the assignment of channels, and
// the end.
//
// Team t works on CHANNELS channels per lane, CHANNEL_STRIDE apart, of channel block t % CHANNEL_BLOCKS, and on
// CHANNEL_BLOCKS of the step's four tiles. Neighbouring lanes read neighbouring 16-byte vectors; weights are read as
// 16-byte broadcasts.
//
// needs: HEADS, HEAD_DIM, INVOCATIONS, KV_HEADS, STEP_TILES, WorkItem, finish_output, finish_value_ranges, put_output,
//   ranged_output, sum_parts, write_lse
// gives: values, CHANNELS, CHANNEL_BLOCKS, sums, value_pages, own_channel, write_states
// binds: 5 values
// set by plans: CHANNELS, CHANNEL_BLOCKS, CHANNEL_STRIDE

@group(0) @binding(5) var<storage, read> values: array<ValueVector>;

// Channels of a lane, and blocks of 32 * CHANNELS channels that the teams are spread over: 1, 2 or 4.
const CHANNELS: u32 = 2u;
const CHANNEL_BLOCKS: u32 = 2u;
const TILE_BLOCKS: u32 = STEP_TILES / CHANNEL_BLOCKS;

// 32, or 32 / CHANNELS where the channels of a lane must be of one group (attend/values.wgsl#byte).
const CHANNEL_STRIDE: u32 = 16u;

var<workgroup> block_sums: array<f32, TILE_BLOCKS * 32u * CHANNELS * CHANNEL_BLOCKS>;

// [head][channel]
var<private> sums: array<f32, HEADS * CHANNELS>;

fn value_pages() -> u32 {
    return arrayLength(&values) / (VALUE_VECTORS * HEAD_DIM * KV_HEADS);
}

fn own_channel(team: u32, lane: u32, k: u32) -> u32 {
    let first = team % CHANNEL_BLOCKS * CHANNELS * 32u + lane / CHANNEL_STRIDE * (CHANNEL_STRIDE * CHANNELS);
    return first + k * CHANNEL_STRIDE + lane % CHANNEL_STRIDE;
}

fn write_states(item: WorkItem, y: u32, team: u32, lane: u32, invocation: u32) {
    var total: array<f32, HEADS>;
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        total[head] = sum_parts[head * INVOCATIONS];
    }
    finish_value_ranges(invocation);
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        // unroll
        for (var k = 0u; k < CHANNELS; k++) {
            block_sums[team / CHANNEL_BLOCKS * (32u * CHANNELS * CHANNEL_BLOCKS) + own_channel(team, lane, k)] =
                sums[head * CHANNELS + k];
        }
        workgroupBarrier();
        for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
            var sum = 0f;
            // unroll
            for (var block = 0u; block < TILE_BLOCKS; block++) {
                sum += block_sums[block * (32u * CHANNELS * CHANNEL_BLOCKS) + channel];
            }
            let output = ranged_output(sum / total[head], head, total[head], channel);
            put_output(item, y, head, channel, output);
        }
        finish_output(item, y, head, invocation);
        write_lse(item, y, head, total[head], invocation);
        workgroupBarrier();
    }
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/value_bytes.wgsl#top
// ----------------------------------------------------------------------------------------------------

// Signed bytes of a field group of values, affine codes. A field shifted to the top of its byte is the signed code
// times 2^(8-bits). The unit of weights compensates for this factor.
//
// gives: ValueVector, VALUE_PLANES, VALUE_VECTORS, VALUE_QUADS, VALUE_BYTE, value_bytes, unsigned_words,
//   unsigned_bytes, value_place
// set by plans: VALUE_BITS, VALUE_MASK

alias ValueVector = vec4<u32>;

const VALUE_BITS: u32 = 2u;
// The top VALUE_BITS bits of every byte.
const VALUE_MASK: u32 = 3233857728u;
const VALUE_PLANES: u32 = 8u / VALUE_BITS;
// Vectors of a channel's column in a tile, and sets of four field groups in a vector: one for each bit
// plane, from above.
const VALUE_VECTORS: u32 = VALUE_BITS;
const VALUE_QUADS: u32 = VALUE_PLANES;
const VALUE_BYTE: f32 = f32(1u << (8u - VALUE_BITS));
// The top bits of all fields of a word: of 1, 2, 4 or 8 bits each.
const VALUE_TOPS: u32 = 0x80808080u | (0x80808080u >> (VALUE_BITS % 8u)) | (0x80808080u >> (2u * VALUE_BITS % 8u)) |
    (0x80808080u >> (3u * VALUE_BITS % 8u)) | select(0u, 0xffffffffu, VALUE_BITS == 1u);

fn value_bytes(words: ValueVector, quad: u32, f: u32) -> u32 {
    return (words[f] << (quad * VALUE_BITS)) & VALUE_MASK;
}

// Adds 128 through the top bit of every field, once for a word instead of for everything extracted from it.
fn unsigned_words(words: ValueVector) -> ValueVector {
    return words ^ vec4<u32>(VALUE_TOPS);
}

fn unsigned_bytes(words: ValueVector, quad: u32, f: u32) -> u32 {
    return value_bytes(words, quad, f);
}

// Quad of the tile and place in it of field group `group`: word group / VALUE_PLANES of the column, bit plane
// group % VALUE_PLANES from below.
fn value_place(group: u32) -> vec2<u32> {
    let word = group / VALUE_PLANES;
    return vec2<u32>(word / 4u * VALUE_PLANES + (VALUE_PLANES - 1u - group % VALUE_PLANES), word % 4u);
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/byte_weights.wgsl#groups
// ----------------------------------------------------------------------------------------------------

// Weights of one byte for every group of channels, with the scales multiplied in: p s as an integer 0 … 255. The block's
// largest p s over all groups is 1. In a group p s is at most the largest r of the block, where r is the scale of a
// token in this group beside its largest in any group. So r becomes 255. The rounding error of the integers multiplies
// only the middle of the codes, c̄ = (2^bits - 1) / 2:
//
//   Σ p (s c + m) ≈ Σ ŵ c + Σ (p m + (p s - ŵ) c̄)
//
// where ŵ approximates p s, and the second sum is one per head and group.
//
// needs: HEADS, LANE_TOKENS, LARGEST_WEIGHT_UNIT, TWO_TO_23, WEIGHT_GROUPS, rescale_acc, store_bytes, token_scores
// gives: BLOCK_MAXIMA, begin_value_ranges, enter_value_ranges, weigh, store_weights
// set by plans: VALUE_CENTRE

// (2^bits - 1) / 2.
const VALUE_CENTRE: f32 = 1.5f;
// Maxima of a block: of the references of every head, and of r in every group.
const BLOCK_MAXIMA: u32 = HEADS + WEIGHT_GROUPS;

// exp2(block's maximum - running maximum).
var<private> block_units: array<f32, HEADS>;

fn begin_value_ranges(invocation: u32) {
    begin_common_sums();
}

fn enter_value_ranges(parity: u32, team: u32, lane: u32) {
    let inverses = 1f / max(largest_scales(), vec4<f32>(1e-30f));
    // unroll
    for (var group = 0u; group < WEIGHT_GROUPS; group++) {
        let r = group_scales(group) * inverses;
        enter_block_max(HEADS + group, max(max(r.x, r.y), max(r.z, r.w)), parity, team, lane);
    }
}

// Stores the weights of a head's tokens in place of their scores and returns their sum, relative to the new running
// maximum.
fn weigh(head: u32, step_max: f32, new_max: f32, parity: u32, team: u32, lane: u32) -> f32 {
    let largest = block_max(head, parity, team, lane);
    var sum = 0f;
    // unroll
    for (var i = 0u; i < LANE_TOKENS; i++) {
        token_scores[head * LANE_TOKENS + i] = exp2(token_scores[head * LANE_TOKENS + i] - largest);
        sum += token_scores[head * LANE_TOKENS + i];
    }
    block_units[head] = exp2(largest - new_max);
    return sum * block_units[head];
}

fn store_weights(team: u32, lane: u32, parity: u32) {
    // unroll
    for (var group = 0u; group < WEIGHT_GROUPS; group++) {
        let scales = group_scales(group);
        let largest = block_max(HEADS + group, parity, team, lane);
        // If every scale of the group in the block is 0, all weights are 0.
        let integers = scales * (255f / max(largest, 1e-30f));
        let unit = largest * LARGEST_WEIGHT_UNIT;
        let centres = group_minima(group) + VALUE_CENTRE * scales;
        // unroll
        for (var head = 0u; head < HEADS; head++) {
            let p = vec4<f32>(token_scores[head * 4u], token_scores[head * 4u + 1u], token_scores[head * 4u + 2u], token_scores[head * 4u + 3u]);
            // Rounded to nearest in the low bits of 2^23 + weight. Shifting drops the bits of 2^23 except one byte, 75.
            // Adding 181 wraps it around.
            let weights = min(p * integers, vec4<f32>(255f));
            let rounded = bitcast<vec4<u32>>(weights + vec4<f32>(8388608f, 8388608f, 8388608f, 8388789f));
            let bytes = rounded.x + (rounded.y << 8u) + (rounded.z << 16u) + (rounded.w << 24u);
            store_bytes(group, head, team, lane, bytes, unit * block_units[head]);
            let sum = bitcast<f32>(dot4U8Packed(bytes, 0x01010101u) + TWO_TO_23) - 8388608f;
            let left = dot(p, centres) - sum * (unit * VALUE_CENTRE);
            let at = group * HEADS + head;
            common_sums[at] = common_sums[at] * rescale_acc[head] + left * block_units[head];
        }
    }
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/block_max.wgsl#subgroup
// ----------------------------------------------------------------------------------------------------

// Largest values over a block of eight lanes, by shuffles: invocations are numbered subgroup by subgroup (see
// attend/numbering.wgsl#subgroup), and subgroups have at least 4 * BLOCK_STRIDE lanes.
//
// needs: BLOCK_MAXIMA, BLOCK_STRIDE
// gives: enter_block_max, block_max

// One for each of BLOCK_MAXIMA.
var<private> block_maxima: array<f32, BLOCK_MAXIMA>;

fn enter_block_max(at: u32, own: f32, parity: u32, team: u32, lane: u32) {
    var largest = max(own, subgroupShuffleXor(own, 1u));
    largest = max(largest, subgroupShuffleXor(largest, BLOCK_STRIDE));
    block_maxima[at] = max(largest, subgroupShuffleXor(largest, 2u * BLOCK_STRIDE));
}

fn block_max(at: u32, parity: u32, team: u32, lane: u32) -> f32 {
    return block_maxima[at];
}

// Called before the first step.
fn begin_block_maxima(invocation: u32) {}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/value_ranges.wgsl#groups
// ----------------------------------------------------------------------------------------------------

// Values with one range per token and group of channels: v = s u + m with u = c + 2^(bits-1). Scales are multiplied
// into the weights before these become integers, so every group of channels has its own weights. The rest is one sum
// per head and group: see byte_weights.wgsl#groups.
//
// The reference of weights takes the largest scale of a token's groups.
//
// needs: GROUP_CHANNELS, HEADS, INVOCATIONS, LANE_TOKENS, TILE_TOKENS, WEIGHT_GROUPS, finish_sums, log_of_scales,
//   scaled_reference, sum_parts, weight_sum
// gives: common_sums, begin_common_sums, load_value_ranges, skip_value_ranges, skip_value_range, own_reference,
//   largest_scales, group_scales, group_minima, finish_value_ranges, ranged_output
// binds: 6 value_ranges

// Scale and minimum in f16: [tile][group of channels][token].
@group(0) @binding(6) var<storage, read> value_ranges: array<u32>;

// Ranges of the invocation's tokens in their stored form: [group][token].
var<private> value_range: array<u32, WEIGHT_GROUPS * LANE_TOKENS>;
// The common part of a group's outputs, relative to the running maximum: [group][head].
var<private> common_sums: array<f32, WEIGHT_GROUPS * HEADS>;

var<workgroup> common_totals: array<f32, WEIGHT_GROUPS * HEADS>;

fn begin_common_sums() {
    // unroll
    for (var i = 0u; i < WEIGHT_GROUPS * HEADS; i++) {
        common_sums[i] = 0f;
    }
}

fn load_value_ranges(tile_base: u32, lane: u32) {
    // unroll
    for (var group = 0u; group < WEIGHT_GROUPS; group++) {
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            value_range[group * LANE_TOKENS + i] = value_ranges[(tile_base * WEIGHT_GROUPS + group) * TILE_TOKENS + i * 32u + lane];
        }
    }
}

fn skip_value_ranges() {
    // unroll
    for (var i = 0u; i < LANE_TOKENS; i++) {
        skip_value_range(i);
    }
}

// Tokens that do not exist: the page may still hold data of an earlier span there.
fn skip_value_range(i: u32) {
    // unroll
    for (var group = 0u; group < WEIGHT_GROUPS; group++) {
        value_range[group * LANE_TOKENS + i] = 0u;
    }
}

fn own_reference(head: u32) -> f32 {
    return scaled_reference(head, log_of_scales(largest_scales()));
}

// The largest scale of every token's groups.
fn largest_scales() -> vec4<f32> {
    var largest = vec4<f32>(0f);
    // unroll
    for (var group = 0u; group < WEIGHT_GROUPS; group++) {
        largest = max(largest, group_scales(group));
    }
    return largest;
}

fn group_scales(group: u32) -> vec4<f32> {
    return vec4<f32>(
        unpack2x16float(value_range[group * LANE_TOKENS]).x,
        unpack2x16float(value_range[group * LANE_TOKENS + 1u]).x,
        unpack2x16float(value_range[group * LANE_TOKENS + 2u]).x,
        unpack2x16float(value_range[group * LANE_TOKENS + 3u]).x,
    );
}

fn group_minima(group: u32) -> vec4<f32> {
    return vec4<f32>(
        unpack2x16float(value_range[group * LANE_TOKENS]).y,
        unpack2x16float(value_range[group * LANE_TOKENS + 1u]).y,
        unpack2x16float(value_range[group * LANE_TOKENS + 2u]).y,
        unpack2x16float(value_range[group * LANE_TOKENS + 3u]).y,
    );
}

fn finish_value_ranges(invocation: u32) {
    // unroll
    for (var group = 0u; group < WEIGHT_GROUPS; group++) {
        workgroupBarrier();
        // unroll
        for (var head = 0u; head < HEADS; head++) {
            weight_sum[head] = common_sums[group * HEADS + head];
        }
        finish_sums(invocation);
        if (invocation < HEADS) {
            common_totals[group * HEADS + invocation] = sum_parts[invocation * INVOCATIONS];
        }
    }
}

fn ranged_output(mean: f32, head: u32, total: f32, channel: u32) -> f32 {
    return mean + common_totals[channel / GROUP_CHANNELS * HEADS + head] / total;
}

// log2 of scales. 0 counts as 2^-25, which is below every other scale in f16. So weights are at most 2^25.
fn log_of_scales(scales: vec4<f32>) -> vec4<f32> {
    return log2(max(scales, vec4<f32>(2.9802322e-8f)));
}

// The largest score + log2(scale) of the lane's tokens for a head.
fn scaled_reference(head: u32, log_scales: vec4<f32>) -> f32 {
    let at = head * LANE_TOKENS;
    let low = max(token_scores[at] + log_scales.x, token_scores[at + 1u] + log_scales.y);
    return max(low, max(token_scores[at + 2u] + log_scales.z, token_scores[at + 3u] + log_scales.w));
}

// Called before and after a tile is added to the sums.
fn enter_value_tile(tile_base: u32, team: u32, lane: u32) {}

fn leave_value_tile() {}

// Called when block `pair` of tile `tile` of the step is added, with the factor of its integers.
fn enter_block(tile: u32, pair: u32, head: u32, scale: f32) {}

// The factor of the sums of channel `k` of the lane when they are added.
fn channel_scale(k: u32) -> f32 {
    return 1f;
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/states.wgsl#states
// ----------------------------------------------------------------------------------------------------

// Attention states: [state][query head], a row of HEAD_DIM outputs and the natural log-sum-exp, padded to 16 bytes.
//
// needs: HEAD_DIM, QUERY_HEADS, WorkItem, head_exists, query_head, query_of
// gives: FIELDS, STATE_ROW, state_row, write_state_channel, write_state_lse

const FIELDS: u32 = HEAD_DIM / 4u;
const STATE_ROW: u32 = FIELDS + 1u;

fn state_row(item: WorkItem, y: u32, head: u32) -> u32 {
    let state = min(item.state + query_of(item, head) * item.stride, arrayLength(&states) / (QUERY_HEADS * STATE_ROW) - 1u);
    return (state * QUERY_HEADS + query_head(y, head)) * STATE_ROW;
}

fn write_state_channel(item: WorkItem, y: u32, head: u32, channel: u32, output: f32) {
    if (head_exists(item, y, head)) {
        states[state_row(item, y, head) + channel / 4u][channel % 4u] = output;
    }
}

fn write_state_lse(item: WorkItem, y: u32, head: u32, lse: f32) {
    if (head_exists(item, y, head)) {
        states[state_row(item, y, head) + FIELDS].x = lse;
    }
}

// Of attend/output_rotation.wgsl, by default:

fn put_output(item: WorkItem, y: u32, head: u32, channel: u32, output: f32) {
    write_state_channel(item, y, head, channel, output);
}

// Called by all invocations once the outputs of a head are written.
fn finish_output(item: WorkItem, y: u32, head: u32, invocation: u32) {}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/merge.wgsl#later
// ----------------------------------------------------------------------------------------------------

// States that `merge_states` joins.
//
// gives: states
// binds: 7 states

@group(0) @binding(7) var<storage, read_write> states: array<vec4<f32>>;

// Called once the states of an item are written.
fn merge_item(item: WorkItem, y: u32, invocation: u32) {}
