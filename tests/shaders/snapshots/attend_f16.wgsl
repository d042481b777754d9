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
// shaders/attend/numbering.wgsl#local
// ----------------------------------------------------------------------------------------------------

// Invocations in the workgroup's own numbering.
//
// gives: Numbering, number

struct Numbering {
    @builtin(local_invocation_index) index: u32,
}

fn number(numbering: Numbering) -> u32 {
    return numbering.index;
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
// shaders/attend/step_scores.wgsl#fma
// ----------------------------------------------------------------------------------------------------

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

// Called after that barrier. Prepares the keys of the first step.
fn begin_keys(tiles: u32, team: u32, lane: u32) {}

// Called before the second barrier of a step. Prepares those of the next step, whose first tile is `first`.
fn prepare_keys(first: u32, tiles: u32, team: u32, lane: u32) {}

// Called once the values of a step are added, when no barrier follows. Also prepares those of the next step.
fn prepare_keys_late(first: u32, tiles: u32, team: u32, lane: u32) {}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/key_field.wgsl#f16
// ----------------------------------------------------------------------------------------------------

// A field group of f16 keys is two words.
//
// needs: KEY_VECTOR, KeyVector
// gives: KEY_WORD_FIELDS, KEY_PLANES, key_field

const KEY_WORD_FIELDS: u32 = KEY_VECTOR / 2u;
const KEY_PLANES: u32 = 1u;

fn key_field(words: KeyVector, w: u32, plane: u32, i: u32) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(words[w * 2u]), unpack2x16float(words[w * 2u + 1u]));
}

// Called before the field group `field` of the lane's tokens is used. Reads their ranges.
fn begin_key_field(tile_base: u32, lane: u32, field: u32) {}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/products.wgsl#add_product #weights_of_step
// ----------------------------------------------------------------------------------------------------

// sum + a · b in four fused multiply-adds. `sum + dot(a, b)` would take one multiplication, three of them and an
// addition.
//
// gives: add_product
fn add_product(a: vec4<f32>, b: vec4<f32>, sum: f32) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}

// Weights relative to the step's maximum, and their exact sum.
//
// needs: HEADS, LANE_TOKENS, rescale_step, token_scores
// gives: weights, weigh

// Weights of the invocation's tokens: [head][token].
var<private> weights: array<f32, HEADS * LANE_TOKENS>;

// Sets the weights of a head's tokens and returns their sum, relative to the new running maximum.
fn weigh(head: u32, step_max: f32, new_max: f32, parity: u32, team: u32, lane: u32) -> f32 {
    var sum = 0f;
    // unroll
    for (var i = 0u; i < LANE_TOKENS; i++) {
        weights[head * LANE_TOKENS + i] = exp2(token_scores[head * LANE_TOKENS + i] - step_max);
        sum += weights[head * LANE_TOKENS + i];
    }
    return sum * rescale_step[head];
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

// Of attend/workgroup_max.wgsl, by default:

// Called once, before the first step.
fn prepare_workgroup_max() {}

// The largest value among the invocations for which this one contributes. Called by all invocations.
fn largest_to_enter(value: u32) -> u32 {
    return value;
}

// Whether the invocation contributes.
fn enters() -> bool {
    return true;
}

// Of attend/logits.wgsl, by default:

fn finish_scores(item: WorkItem, tile: u32, lane: u32) {}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/values.wgsl#fma
// ----------------------------------------------------------------------------------------------------

// Weighted sum of values with f32 multiply-adds, for f16 values and for ranges that change inside a tile.
//
// Weights lie in workgroup memory, one vector of four tokens per field group, written by the invocation that scored
// them. Team t works on CHANNELS channels per lane, 32 apart, of channel block t % CHANNEL_BLOCKS, and on
// CHANNEL_BLOCKS of the step's four tiles. Neighbouring lanes read neighbouring vectors.
//
// needs: HEADS, HEAD_DIM, INVOCATIONS, KV_HEADS, STEP_TILES, TILE_TOKENS, WorkItem, finish_output, put_output,
//   rescale_acc, rescale_step, sum_parts, tile_bases, write_lse
// gives: ValueVector, CHANNELS, sums, value_pages, begin_values, store_weights, own_channel, add_values, write_states
// binds: 5 values
// set by plans: ValueVector, Weights, CHANNELS, CHANNEL_BLOCKS

alias ValueVector = vec4<u32>;
alias Weights = vec4<f32>;

@group(0) @binding(5) var<storage, read> values: array<ValueVector>;

// Channels of a lane, and blocks of 32 * CHANNELS channels that the teams are spread over: 1, 2 or 4.
const CHANNELS: u32 = 4u;
const CHANNEL_BLOCKS: u32 = 1u;
const TILE_BLOCKS: u32 = STEP_TILES / CHANNEL_BLOCKS;

// What the largest weight becomes. Halves lose bits below 2^-14, and are 0 below 2^-25. So small weights make the whole
// output beside a sink without a value.
const LARGEST_WEIGHT: f32 = 16384f;

// [head][tile of the step][field group]
var<workgroup> step_weights: array<Weights, HEADS * TILE_TOKENS>;
var<workgroup> block_sums: array<f32, TILE_BLOCKS * 32u * CHANNELS * CHANNEL_BLOCKS>;

// [head][channel]
var<private> sums: array<f32, HEADS * CHANNELS>;

fn value_pages() -> u32 {
    return arrayLength(&values) / (VALUE_VECTORS * HEAD_DIM * KV_HEADS);
}

fn begin_values(invocation: u32) {
    // unroll
    for (var i = 0u; i < HEADS * CHANNELS; i++) {
        sums[i] = 0f;
    }
}

fn store_weights(team: u32, lane: u32, parity: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        let w = vec4<f32>(weights[head * 4u], weights[head * 4u + 1u], weights[head * 4u + 2u], weights[head * 4u + 3u]);
        step_weights[(head * STEP_TILES + team) * 32u + lane] = Weights(w * (rescale_step[head] * LARGEST_WEIGHT));
    }
}

fn own_channel(team: u32, lane: u32, k: u32) -> u32 {
    return (team % CHANNEL_BLOCKS * CHANNELS + k) * 32u + lane;
}

fn add_values(first: u32, tiles: u32, team: u32, lane: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        // unroll
        for (var k = 0u; k < CHANNELS; k++) {
            sums[head * CHANNELS + k] *= rescale_acc[head];
        }
    }
    let first_tile = team / CHANNEL_BLOCKS * CHANNEL_BLOCKS;
    let end_tile = min(first_tile + CHANNEL_BLOCKS, tiles - first);
    for (var tile = first_tile; tile < end_tile; tile++) {
        let tile_base = tile_bases[first + tile];
        let base = tile_base * (VALUE_VECTORS * HEAD_DIM);
        // unroll
        for (var k = 0u; k < CHANNELS; k++) {
            begin_value_tile(tile_base, min(own_channel(team, lane, k), HEAD_DIM - 1u), k);
        }
        for (var vector = 0u; vector < VALUE_VECTORS; vector++) {
            var words: array<ValueVector, CHANNELS>;
            // unroll
            for (var k = 0u; k < CHANNELS; k++) {
                words[k] = values[base + vector * HEAD_DIM + min(own_channel(team, lane, k), HEAD_DIM - 1u)];
            }
            for (var plane = 0u; plane < VALUE_PLANES; plane++) {
                // unroll
                for (var w = 0u; w < VALUE_WORD_FIELDS; w++) {
                    let field = (vector * VALUE_WORD_FIELDS + w) * VALUE_PLANES + plane;
                    var v: array<vec4<f32>, CHANNELS>;
                    // unroll
                    for (var k = 0u; k < CHANNELS; k++) {
                        v[k] = value_field(words[k], w, plane, field, k);
                    }
                    // unroll
                    for (var head = 0u; head < HEADS; head++) {
                        let p = vec4<f32>(step_weights[(head * STEP_TILES + tile) * 32u + field]);
                        // unroll
                        for (var k = 0u; k < CHANNELS; k++) {
                            sums[head * CHANNELS + k] = add_product(p, v[k], sums[head * CHANNELS + k]);
                        }
                    }
                }
            }
        }
    }
}

fn write_states(item: WorkItem, y: u32, team: u32, lane: u32, invocation: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        let total = sum_parts[head * INVOCATIONS];
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
            put_output(item, y, head, channel, sum / (total * LARGEST_WEIGHT));
        }
        finish_output(item, y, head, invocation);
        write_lse(item, y, head, total, invocation);
        workgroupBarrier();
    }
}

// Called with the first reads of an item. Reads the ranges that its outputs are scaled with.
fn read_output_ranges(range_slot: u32, kv_head: u32, invocation: u32) {}

// Called by the team of a tile. Reads the ranges of the lane's tokens. The other two are for tokens that do not exist:
// all of them, or token `i`.
fn load_value_ranges(tile_base: u32, lane: u32) {}

fn skip_value_ranges() {}

fn skip_value_range(i: u32) {}

// The largest score of the lane's tokens for a head, or what else their weights are relative to.
fn own_reference(head: u32) -> f32 {
    return max(max(token_scores[head * 4u], token_scores[head * 4u + 1u]), max(token_scores[head * 4u + 2u], token_scores[head * 4u + 3u]));
}

// Called before the first barrier of a step. Records the values that other lanes need: the reference of maximum
// `at`, and the ranges.
fn enter_block_max(at: u32, own: f32, parity: u32, team: u32, lane: u32) {}

fn enter_value_ranges(parity: u32, team: u32, lane: u32) {}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/value_field.wgsl#f16
// ----------------------------------------------------------------------------------------------------

// A field group of f16 values is two words.
//
// needs: ValueVector
// gives: VALUE_WORD_FIELDS, VALUE_PLANES, VALUE_VECTORS, value_field

const VALUE_WORD_FIELDS: u32 = 2u;
const VALUE_PLANES: u32 = 1u;
const VALUE_VECTORS: u32 = 16u;

fn value_field(words: ValueVector, w: u32, plane: u32, field: u32, k: u32) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(words[w * 2u]), unpack2x16float(words[w * 2u + 1u]));
}

// Called before channel `k` of the lane is read from a tile. Reads its ranges.
fn begin_value_tile(tile_base: u32, channel: u32, k: u32) {}

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
