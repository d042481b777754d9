// ----------------------------------------------------------------------------------------------------
// shaders/attend/weighted_values.wgsl
// ----------------------------------------------------------------------------------------------------

// weighted_values: attention states from stored scores and packed values (CalibQuant, Algorithm 2), with calibration.
//
//   s'_t = slope · s_t + offset,  lse = ln Σ exp(s'_t),  output = Σ exp(s'_t - lse) v_t
//
// over the tokens of one work item. Slope and offset come from the extremes of the head's scores over the whole span
// (eq. 7 and 8), which `scores` wrote.
//
// Work, memory traffic, merging and bounds are as in `attend`, except that 4 bytes per token and query head are read
// instead of the keys.

@compute @workgroup_size(128)
fn weighted_values(@builtin(workgroup_id) group: vec3<u32>, numbering: Numbering) {
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
// shaders/attend/step_scores.wgsl#stored
// ----------------------------------------------------------------------------------------------------

// Scores that `scores` stored, calibrated: score' = slope · score + offset, one map per prepared query and query head.
//
// needs: HEADS, LANE_TOKENS, LOG2_E, QUERY_HEADS, TILE_TOKENS, WorkItem, query_head, token_scores
// gives: load_query, score_tile
// binds: 2 stored_scores, 3 extremes
// set by plans: TAU_1, TAU_2

// Natural-log scores [query head][token], tile after tile. The tiles of an item follow its first one.
@group(0) @binding(2) var<storage, read> stored_scores: array<f32>;
// Largest score and largest negated score of every prepared query and query head, ordered.
@group(0) @binding(3) var<storage, read> extremes: array<vec2<u32>>;

const TAU_1: f32 = 0.0f;
const TAU_2: f32 = 3.0f;

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

// ----------------------------------------------------------------------------------------------------
// shaders/common/ordered.wgsl#ordered #larger
// ----------------------------------------------------------------------------------------------------

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
// shaders/attend/values.wgsl#dot
// ----------------------------------------------------------------------------------------------------

// Weighted sum of packed values with integer dot products.
//
// Weights become integers of 15 bits relative to the step's largest weight, in two signed byte planes. The invocation
// that scored the four tokens of a field group packs them four to a word. Rounding is dithered by a fixed pattern over
// the tokens of a step. Rounding to nearest would drop every weight below half a unit at once when one token of the
// step outweighs the others by more than 2^16.
//
// needs: HEADS, HEAD_DIM, LANE_TOKENS, STEP_TILES, TILE_TOKENS, rescale_acc, rescale_step, tile_bases
// gives: weight_bytes, begin_values, store_weights, add_values

const LARGEST_WEIGHT: f32 = 32639f;
// Factor of a sum of integer weights times bytes.
const WEIGHT_UNIT: f32 = 1f / (32639f * VALUE_BYTE);
const GOLDEN_RATIO: f32 = 0.618034f;

// [head][byte plane][tile of the step][vector][quad], four field groups each: the order of use.
var<workgroup> weight_bytes: array<vec4<u32>, HEADS * 2u * STEP_TILES * 8u>;
// Added to the weights of the invocation's tokens before they are truncated to integers: 0 … 1, spread evenly over the
// tokens of a step.
var<private> dither: array<f32, LANE_TOKENS>;

fn begin_values(invocation: u32) {
    // unroll
    for (var i = 0u; i < LANE_TOKENS; i++) {
        dither[i] = fract(f32(invocation / 32u * TILE_TOKENS + i * 32u + invocation % 32u) * GOLDEN_RATIO);
    }
    // unroll
    for (var i = 0u; i < HEADS * CHANNELS; i++) {
        sums[i] = 0f;
    }
    begin_value_ranges(invocation);
}

fn store_weights(team: u32, lane: u32, parity: u32) {
    take_value_ranges();
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        var integers: vec4<u32>;
        // unroll
        for (var i = 0u; i < LANE_TOKENS; i++) {
            integers[i] = u32(ranged_weight(weights[head * LANE_TOKENS + i], i) * LARGEST_WEIGHT + dither[i]);
        }
        // Two integers of up to 16 bits per word, so that two bytes are extracted at once.
        let even = integers.x | (integers.z << 16u);
        let odd = integers.y | (integers.w << 16u);
        let low = (even & 0x00ff00ffu) | ((odd & 0x00ff00ffu) << 8u);
        // The low byte counts as signed, so it borrows from the high one where its top bit is set.
        let high = (((even + 0x00800080u) >> 8u) & 0x00ff00ffu) | ((odd + 0x00800080u) & 0xff00ff00u);
        let place = value_place(lane);
        let at = (head * 2u * STEP_TILES + team) * 8u + place.x;
        weight_bytes[at][place.y] = low;
        weight_bytes[at + STEP_TILES * 8u][place.y] = high;
    }
}

fn add_values(first: u32, tiles: u32, team: u32, lane: u32) {
    // [byte plane][head][channel]
    var step_sums: array<i32, 2u * HEADS * CHANNELS>;
    // unroll
    for (var i = 0u; i < 2u * HEADS * CHANNELS; i++) {
        step_sums[i] = 0i;
    }
    let first_tile = team / CHANNEL_BLOCKS * CHANNEL_BLOCKS;
    let end_tile = min(first_tile + CHANNEL_BLOCKS, tiles - first);
    for (var tile = first_tile; tile < end_tile; tile++) {
        let base = tile_bases[first + tile] * (VALUE_VECTORS * HEAD_DIM);
        for (var vector = 0u; vector < VALUE_VECTORS; vector++) {
            var words: array<ValueVector, CHANNELS>;
            // unroll
            for (var k = 0u; k < CHANNELS; k++) {
                words[k] = values[base + vector * HEAD_DIM + min(own_channel(team, lane, k), HEAD_DIM - 1u)];
            }
            for (var quad = 0u; quad < VALUE_QUADS; quad++) {
                var codes: array<u32, 4u * CHANNELS>;
                // unroll
                for (var f = 0u; f < 4u; f++) {
                    // unroll
                    for (var k = 0u; k < CHANNELS; k++) {
                        codes[f * CHANNELS + k] = value_bytes(words[k], quad, f);
                    }
                }
                // unroll
                for (var head = 0u; head < HEADS; head++) {
                    // unroll
                    for (var plane = 0u; plane < 2u; plane++) {
                        let w = weight_bytes[((head * 2u + plane) * STEP_TILES + tile) * 8u + vector * VALUE_QUADS + quad];
                        // unroll
                        for (var k = 0u; k < CHANNELS; k++) {
                            let at = (plane * HEADS + head) * CHANNELS + k;
                            // One addition of three operands for two products.
                            step_sums[at] = step_sums[at] + dot4I8Packed(codes[k], w.x) + dot4I8Packed(codes[CHANNELS + k], w.y);
                            step_sums[at] = step_sums[at] + dot4I8Packed(codes[2u * CHANNELS + k], w.z) + dot4I8Packed(codes[3u * CHANNELS + k], w.w);
                        }
                    }
                }
            }
        }
    }
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        // unroll
        for (var k = 0u; k < CHANNELS; k++) {
            let at = head * CHANNELS + k;
            // At most 512 tokens · 32639 · 128 in magnitude: it fits 32 bits.
            let sum = step_sums[HEADS * CHANNELS + at] * 256i + step_sums[at];
            let unit = rescale_step[head] * WEIGHT_UNIT;
            sums[at] = sums[at] * rescale_acc[head] + f32(sum) * unit;
        }
    }
}

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
// shaders/attend/products.wgsl#value_dots #weights_of_step
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
const CHANNEL_STRIDE: u32 = 32u;

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
// shaders/attend/value_bytes.wgsl#top
// ----------------------------------------------------------------------------------------------------

// Signed bytes of a field group of values, affine codes. A field shifted to the top of its byte is the signed code
// times 2^(8-bits). The unit of weights compensates for this factor.
//
// gives: ValueVector, VALUE_PLANES, VALUE_VECTORS, VALUE_QUADS, VALUE_BYTE, value_bytes, unsigned_words,
//   unsigned_bytes, value_place
// set by plans: VALUE_BITS, VALUE_MASK

alias ValueVector = vec4<u32>;

const VALUE_BITS: u32 = 4u;
// The top VALUE_BITS bits of every byte.
const VALUE_MASK: u32 = 4042322160u;
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
// shaders/attend/value_ranges.wgsl#folded
// ----------------------------------------------------------------------------------------------------

// Per-channel ranges of the span: v = s u + m with u = c + 2^(bits-1), applied once to every output.
//
// needs: HEAD_DIM, INVOCATIONS, KV_HEADS
// gives: read_output_ranges, begin_value_ranges, ranged_output
// binds: 6 value_span_ranges
// set by plans: VALUE_MIDDLE

// Scale and minimum: [range slot][KV head][channel].
@group(0) @binding(6) var<storage, read> value_span_ranges: array<vec2<f32>>;

const VALUE_MIDDLE: f32 = 8.0f;

// Ranges of the outputs, by channel. They are read at the start of an item, so that nothing waits for them at its end.
var<workgroup> output_ranges: array<vec2<f32>, HEAD_DIM>;

const OWN_CHANNELS: u32 = (HEAD_DIM + INVOCATIONS - 1u) / INVOCATIONS;

var<private> own_ranges: array<vec2<f32>, OWN_CHANNELS>;

fn read_output_ranges(range_slot: u32, kv_head: u32, invocation: u32) {
    let slot = min(range_slot, arrayLength(&value_span_ranges) / (KV_HEADS * HEAD_DIM) - 1u);
    // unroll
    for (var i = 0u; i < OWN_CHANNELS; i++) {
        let channel = min(i * INVOCATIONS + invocation, HEAD_DIM - 1u);
        own_ranges[i] = value_span_ranges[(slot * KV_HEADS + kv_head) * HEAD_DIM + channel];
    }
}

fn begin_value_ranges(invocation: u32) {
    // unroll
    for (var i = 0u; i < OWN_CHANNELS; i++) {
        if (i * INVOCATIONS + invocation < HEAD_DIM) {
            output_ranges[i * INVOCATIONS + invocation] = own_ranges[i];
        }
    }
}

fn ranged_output(mean: f32, head: u32, total: f32, channel: u32) -> f32 {
    let range = output_ranges[channel];
    return range.x * (mean + VALUE_MIDDLE) + range.y;
}

// Called once the weights of a step are known, before they become integers.
fn take_value_ranges() {}

// The weight of token `i` of the lane, times its scale where the scale is multiplied into it: 0 … 1.
fn ranged_weight(weight: f32, i: u32) -> f32 {
    return weight;
}

// Called once before the outputs are written, by all invocations.
fn finish_value_ranges(invocation: u32) {}

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
