enable f16;

enable wgpu_cooperative_matrix;

// ----------------------------------------------------------------------------------------------------
// shaders/attend/attend_run.wgsl
// ----------------------------------------------------------------------------------------------------

// attend_run: `attend` of many queries of a run together, with cooperative matrices.
//
//   s_rt = q_r · k_t / √D,  lse_r = ln Σ exp(s_rt),  output_r = Σ exp(s_rt - lse_r) v_t
//
// over the tokens of one work item. A row r is a query and one of the query heads of the item's KV head, up to ROWS of
// them, in f16: `prepare_run_query` wrote them, or the caller (slot `run_queries`). Products are 16 × 16 × 16, in f16
// with f32 sums. `merge_states` merges the items; one with all that its queries see writes their outputs.
//
// A subgroup of 32 owns two blocks of 16 rows, or one where a row has more than 128 channels. Their queries (the left
// operands of scores) and their sums stay in its registers for the whole item. All subgroups share the tokens, which
// stream through in steps of 16 and are unpacked to halves in workgroup memory once. A step is the eight tokens of two
// vectors of values: those at 4 step, and 32, 64 and 96 further. There are two barriers per step:
//
//   products with values of the last step, scores -> workgroup memory | weights -> workgroup memory
//
// The slot `run_arrivals` decides when keys and values are loaded, and when they are stored there.
//
// Weights are relative to a reference of their row, a power of two. Weights may grow to 2^MOST_WEIGHT. Before they
// would grow further, the reference moves so that the largest is 2^START_WEIGHT. Then the sums pass through workgroup
// memory, where a row can be scaled. That is rare, and all subgroups wait for it, so that every barrier is reached by
// all.
//
// Memory: keys and values are read once for ROWS rows. Workgroup memory: rows of keys, columns of values, rows of
// scores and of weights are padded, so that simultaneous accesses fall into different banks (`RunRows::workgroup_bytes`
// counts it). For a product a subgroup reads 256 bytes of keys or values.
//
// In bounds: as `attend`; blocks of rows lie within the prepared ones, behind which there are RUN_ROWS more; rows
// beyond the item's write nothing. Loops are bounded by an item's tiles and by constants. Control flow around products
// is uniform: it depends on the item, and on words that lie in workgroup memory between two barriers. Divisors are sums
// of weights, of which the largest is at least 2^START_WEIGHT at the time, or 1.
//
// gives: SCORE_ROW, scores, row_weights, share, store_keys, store_values
// set by plans: SCORE_ROW

// A row of scores in workgroup memory, in vectors of four: 6 or 5. With 6, products of a block are stored without
// conflicts of banks.
const SCORE_ROW: u32 = 5u;

// [step][token][channel], [channel][token], [row][token], [row][token]. Nothing follows the last row.
var<workgroup> key_tile: array<Half4, KEY_STEPS * KEYS_OF_STEP - 2u>;
var<workgroup> value_tile: array<Half4, HEAD_DIM * VALUE_ROW - 2u>;
var<workgroup> scores: array<vec4<f32>, SCORES>;
var<workgroup> row_weights: array<Half4, ROWS * WEIGHT_ROW - 2u>;
// Whether rows of a subgroup moved their references in this step.
var<workgroup> moved: array<vec4<u32>, SUBGROUPS / 4u>;

// For the lane's row: the tokens of the item that it sees, the factor of its products, the reference, and the sum of
// weights. Each of the first OWN_ROWS lanes computes the weights of one row; others compute the same, and write
// nothing.
var<private> row_tokens: u32;
var<private> unit: f32;
var<private> reference: f32;
var<private> weight_sum: f32;
// The weights of its tokens at the end, without a sink.
var<private> share: f32;

// Stores the loaded keys or values where products read them.
fn store_keys(step: u32, invocation: u32) {
    // unroll
    for (var i = 0u; i < LOADS; i++) {
        let at = i * INVOCATIONS + invocation;
        if (at < EIGHTS_OF_STEP) {
            let halves = key_halves(arriving_keys[i], at / 16u);
            let to = step % KEY_STEPS * KEYS_OF_STEP + at % 16u * KEY_ROW + at / 16u * 2u;
            key_tile[to] = halves.low;
            key_tile[to + 1u] = halves.high;
        }
    }
}

fn store_values(step: u32, invocation: u32) {
    // unroll
    for (var i = 0u; i < LOADS; i++) {
        let at = i * INVOCATIONS + INVOCATIONS - 1u - invocation;
        if (at < EIGHTS_OF_STEP) {
            let vector = step % TILE_STEPS * 2u + at / HEAD_DIM;
            let halves = value_halves(arriving_values[i], vector);
            let to = at % HEAD_DIM * VALUE_ROW + at / HEAD_DIM * 2u;
            value_tile[to] = halves.low;
            value_tile[to + 1u] = halves.high;
        }
    }
}

// Multiplies the subgroup's rows with the keys of a step. The units are not applied yet.
fn score(rows: ptr<function, array<Left, ROW_BLOCKS * STEPS>>, token_step: u32, team: u32) {
    let first_key = token_step % KEY_STEPS * KEYS_OF_STEP;
    var blocks: array<Sums, ROW_BLOCKS>;
    // unroll
    for (var block = 0u; block < ROW_BLOCKS; block++) {
        blocks[block] = Sums();
    }
    // unroll
    for (var step = 0u; step < STEPS; step++) {
        let k = coopLoad<Right>(&key_tile[first_key + step * 4u], KEY_ROW);
        // unroll
        for (var block = 0u; block < ROW_BLOCKS; block++) {
            blocks[block] = coopMultiplyAdd((*rows)[block * STEPS + step], k, blocks[block]);
        }
    }
    // unroll
    for (var block = 0u; block < ROW_BLOCKS; block++) {
        coopStoreT(blocks[block], &scores[(team * OWN_ROWS + block * 16u) * SCORE_ROW], SCORE_ROW);
    }
}

// Computes the weights of the step for the lane's row. Every row sees the first `least` tokens.
fn weigh(step: u32, least: u32, team: u32, lane: u32) {
    let row = team * OWN_ROWS + lane % OWN_ROWS;
    let first_token = step / TILE_STEPS * TILE_TOKENS + step % TILE_STEPS * 4u;
    var s: array<vec4<f32>, ROW_SCORES>;
    // unroll
    for (var i = 0u; i < ROW_SCORES; i++) {
        s[i] = scores[row * SCORE_ROW + i];
    }
    // Only the last tiles have tokens that a row does not see.
    if ((step / TILE_STEPS + 1u) * TILE_TOKENS > least) {
        // unroll
        for (var i = 0u; i < ROW_SCORES; i++) {
            let token = vec4<u32>(first_token + i) + vec4<u32>(0u, 32u, 64u, 96u);
            s[i] = select(vec4<f32>(NO_PRODUCT), s[i], token < vec4<u32>(row_tokens));
        }
    }
    var high = s[0];
    // unroll
    for (var i = 0u; i < ROW_SCORES - 1u; i++) {
        high = max(high, s[i + 1u]);
    }
    let top = max(max(high.x, high.y), max(high.z, high.w)) * unit;
    let far = top - reference > MOST_WEIGHT;
    let new_reference = select(reference, ceil(top - START_WEIGHT), far);
    let factor = exp2(reference - new_reference);
    // Before the first step there are no sums.
    let moves = subgroupAny(far && step > 0u);
    reference = new_reference;
    // The sum of the rounded weights, so that the mean of the values is exact.
    var sum = 0f;
    // unroll
    for (var i = 0u; i < ROW_SCORES; i++) {
        let p = Half4(exp2(s[i] * unit - vec4<f32>(new_reference)));
        if (lane < OWN_ROWS) {
            row_weights[row * WEIGHT_ROW + i] = p;
        }
        let rounded = vec4<f32>(p);
        sum += (rounded.x + rounded.y) + (rounded.z + rounded.w);
    }
    weight_sum = weight_sum * factor + sum;
    if (lane < OWN_ROWS) {
        keep_factor(row, factor);
    }
    if (lane == 0u) {
        moved[team / 4u][team % 4u] = select(0u, 1u, moves);
    }
}

fn any_moved() -> bool {
    var all = vec4<u32>();
    // unroll
    for (var i = 0u; i < SUBGROUPS / 4u; i++) {
        all |= moved[i];
    }
    return any(all != vec4<u32>());
}

// Multiplies the sums of the rows by their factors.
fn move_sums(sums: ptr<function, array<Sums, ROW_BLOCKS * STEPS>>, team: u32, lane: u32) {
    // unroll
    for (var step = 0u; step < STEPS; step++) {
        // unroll
        for (var block = 0u; block < ROW_BLOCKS; block++) {
            let at = (team * OWN_ROWS + block * 16u) * SCORE_ROW;
            coopStoreT((*sums)[block * STEPS + step], &scores[at], SCORE_ROW);
        }
        workgroupBarrier();
        if (lane < OWN_ROWS) {
            // unroll
            for (var i = 0u; i < ROW_SCORES; i++) {
                let row = team * OWN_ROWS + lane;
                scores[row * SCORE_ROW + i] *= kept_factor(row);
            }
        }
        workgroupBarrier();
        // unroll
        for (var block = 0u; block < ROW_BLOCKS; block++) {
            let at = (team * OWN_ROWS + block * 16u) * SCORE_ROW;
            (*sums)[block * STEPS + step] = coopLoadT<Sums>(&scores[at], SCORE_ROW);
        }
        workgroupBarrier();
    }
}

fn add_values(sums: ptr<function, array<Sums, ROW_BLOCKS * STEPS>>, team: u32) {
    var p: array<Left, ROW_BLOCKS>;
    // unroll
    for (var block = 0u; block < ROW_BLOCKS; block++) {
        let at = (team * OWN_ROWS + block * 16u) * WEIGHT_ROW;
        p[block] = coopLoadT<Left>(&row_weights[at], WEIGHT_ROW);
    }
    // unroll
    for (var step = 0u; step < STEPS; step++) {
        let v = coopLoad<Right>(&value_tile[step * 16u * VALUE_ROW], VALUE_ROW);
        // unroll
        for (var block = 0u; block < ROW_BLOCKS; block++) {
            (*sums)[block * STEPS + step] = coopMultiplyAdd(p[block], v, (*sums)[block * STEPS + step]);
        }
    }
}

fn take_values(sums: ptr<function, array<Sums, ROW_BLOCKS * STEPS>>, team: u32, lane: u32) {
    if (any_moved()) {
        move_sums(sums, team, lane);
    }
    add_values(sums, team);
}

@compute @workgroup_size(INVOCATIONS)
fn attend_run(@builtin(workgroup_id) group: vec3<u32>, numbering: Numbering) {
    let item = read_item(group.y);
    let y = group.x;
    let invocation = number(numbering);
    let lane = invocation % 32u;
    let team = invocation / 32u;
    let tiles = (item.tokens + TILE_TOKENS - 1u) / TILE_TOKENS;

    keep_item(item, invocation);
    keep_tile_base(read_tile_base(item.page_offset, tiles, y, invocation), tiles, invocation);
    let first = first_row(item, y);
    var rows: array<Left, ROW_BLOCKS * STEPS>;
    load_rows(&rows, item, first, team, lane);
    let own_row = team * OWN_ROWS + lane % OWN_ROWS;
    let constants = constants_of(first + own_row);
    unit = constants.x * KEY_UNIT;
    // Each query sees one token more than the one before it, up to all of the item.
    let query = min(own_row / GROUP, item.later);
    row_tokens = item.tokens - min(item.later - query, item.tokens);
    let least = item.tokens - min(item.later, item.tokens);
    reference = LOWEST;
    weight_sum = 0f;
    if (invocation < SUBGROUPS / 4u) {
        moved[invocation] = vec4<u32>();
    }
    var sums: array<Sums, ROW_BLOCKS * STEPS>;
    // unroll
    for (var i = 0u; i < ROW_BLOCKS * STEPS; i++) {
        sums[i] = Sums();
    }
    workgroupBarrier();
    load_keys(0u, tiles, invocation);
    store_keys(0u, invocation);
    before_steps(tiles, invocation);
    workgroupBarrier();
    before_products(0u, tiles, invocation);
    score(&rows, 0u, team);
    behind_products(0u, tiles, invocation);
    workgroupBarrier();
    before_weights(0u, tiles, invocation);
    weigh(0u, least, team, lane);
    behind_weights(0u, tiles, invocation);
    workgroupBarrier();
    for (var step = 1u; step < tiles * TILE_STEPS; step++) {
        before_products(step, tiles, invocation);
        take_values(&sums, team, lane);
        score(&rows, step, team);
        behind_products(step, tiles, invocation);
        workgroupBarrier();
        before_weights(step, tiles, invocation);
        weigh(step, least, team, lane);
        behind_weights(step, tiles, invocation);
        workgroupBarrier();
    }
    take_values(&sums, team, lane);
    if (lane < OWN_ROWS) {
        let lse = (reference + log2(weight_sum) + constants.y) * LN_2;
        let end = end_row(kept_item(), y, own_row, weight_sum, lse);
        keep_factor(own_row, end.x);
        share = end.y;
    }
    workgroupBarrier();
    write_outputs(&sums, kept_item(), y, team, lane);
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/run_tiles.wgsl
// ----------------------------------------------------------------------------------------------------

// Rows and tokens of the kernels that take many queries with cooperative matrices, and what an invocation loads.
//
// gives: Half4, Left, Right, Sums, Eight, SUBGROUPS, ROW_BLOCKS, OWN_ROWS, ROWS, STEPS, EIGHTS, TOKEN_VECTORS,
//   TILE_STEPS, KEY_ROW, KEYS_OF_STEP, VALUE_ROW, WEIGHT_ROW, EIGHTS_OF_STEP, LOADS, ROW_SCORES, MOST_WEIGHT,
//   START_WEIGHT, NO_PRODUCT, arriving_keys, arriving_values, pages, load_keys, load_values
// set by plans: SUBGROUPS, ROW_BLOCKS

alias Half4 = vec4<f16>;
alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sums = coop_mat16x16<f32, C>;

struct Eight {
    low: Half4,
    high: Half4,
}

const SUBGROUPS: u32 = 8u;
// Blocks of 16 rows in a subgroup, and its rows.
const ROW_BLOCKS: u32 = 2u;
const OWN_ROWS: u32 = ROW_BLOCKS * 16u;
const ROWS: u32 = SUBGROUPS * OWN_ROWS;

const STEPS: u32 = HEAD_DIM / 16u;
const EIGHTS: u32 = HEAD_DIM / 8u;
// Vectors of eight tokens of a tile's values, and steps of a tile.
const TOKEN_VECTORS: u32 = 16u;
const TILE_STEPS: u32 = 8u;
// Sizes in vectors of four: a key, a channel of values and a row of weights in workgroup memory.
const KEY_ROW: u32 = HEAD_DIM / 4u + 2u;
const KEYS_OF_STEP: u32 = 16u * KEY_ROW;
const VALUE_ROW: u32 = 6u;
const WEIGHT_ROW: u32 = 6u;
// Groups of eight keys, and as many of values, in a step, and those that an invocation moves.
const EIGHTS_OF_STEP: u32 = 2u * HEAD_DIM;
const LOADS: u32 = (EIGHTS_OF_STEP + INVOCATIONS - 1u) / INVOCATIONS;
// Vectors of four scores of a row.
const ROW_SCORES: u32 = 4u;

// Exponents of two: the largest allowed weight, and the largest weight after the reference moved.
const MOST_WEIGHT: f32 = 15f;
const START_WEIGHT: f32 = 6f;
// The product of a token that does not exist: minus infinity, times any unit.
const NO_PRODUCT: f32 = -3.4028234e38f;

// Loads of the invocation in flight.
var<private> arriving_keys: array<KeyWord, LOADS>;
var<private> arriving_values: array<ValueWord, LOADS>;

fn pages() -> u32 {
    return min(run_key_pages(), run_value_pages());
}

// Loads the keys of a step, or its values. Steps beyond the item load those of its last tile.
fn load_keys(step: u32, tiles: u32, invocation: u32) {
    let tile_base = tile_bases[min(step / TILE_STEPS, tiles - 1u)];
    // unroll
    for (var i = 0u; i < LOADS; i++) {
        let at = min(i * INVOCATIONS + invocation, EIGHTS_OF_STEP - 1u);
        // The order of values: tokens 2 vector + p / 4 % 2 + 32 (p % 4) of vectors 2 step + p / 8.
        let p = at % 16u;
        let token = step % TILE_STEPS * 4u + p / 4u + 32u * (p % 4u);
        arriving_keys[i] = load_key(tile_base, token, at / 16u);
    }
}

fn load_values(step: u32, tiles: u32, invocation: u32) {
    let tile_base = tile_bases[min(step / TILE_STEPS, tiles - 1u)];
    load_ranges(tile_base, step % TILE_STEPS, invocation);
    // unroll
    for (var i = 0u; i < LOADS; i++) {
        let at = min(i * INVOCATIONS + INVOCATIONS - 1u - invocation, EIGHTS_OF_STEP - 1u);
        arriving_values[i] = load_value(tile_base, step % TILE_STEPS * 2u + at / HEAD_DIM, at % HEAD_DIM);
    }
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
const INVOCATIONS: u32 = 256u;
const STEP_TILES: u32 = 4u;
const LANE_TOKENS: u32 = 4u;

const HEAD_DIM: u32 = 128u;
const KV_HEADS: u32 = 2u;
const QUERY_HEADS: u32 = 8u;
const GROUP: u32 = QUERY_HEADS / KV_HEADS;
// Most queries of an item.
const QUERIES: u32 = 64u;
// Heads of one workgroup, those of all its queries, and workgroups that share the query heads of a KV head.
const HEADS: u32 = 256u;
const CHUNKS: u32 = 1u;
// Most tiles of an item.
const MAX_TILES: u32 = 128u;

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

// ----------------------------------------------------------------------------------------------------
// shaders/attend/run_keys.wgsl#channel_4bit
// ----------------------------------------------------------------------------------------------------

// Keys of 4 bits with a range per channel, which is folded into the query: halves are codes.
//
// needs: EIGHTS, Eight, KV_HEADS, TILE_TOKENS
// gives: KEY_UNIT, KeyWord, run_key_pages, load_key, key_halves
// binds: 3 keys

const KEY_UNIT: f32 = 1f;

alias KeyWord = u32;

@group(0) @binding(3) var<storage, read> keys: array<vec4<u32>>;

fn run_key_pages() -> u32 {
    return arrayLength(&keys) / (EIGHTS / 4u * TILE_TOKENS * KV_HEADS);
}

fn load_key(tile_base: u32, token: u32, eight: u32) -> KeyWord {
    return keys[(tile_base * (EIGHTS / 4u) + eight / 4u) * TILE_TOKENS + token][eight % 4u];
}

fn key_halves(word: KeyWord, eight: u32) -> Eight {
    return code_halves(word, SIGNED_CODES);
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/codes.wgsl#four_bits
// ----------------------------------------------------------------------------------------------------

// Codes of 4 bits as halves, for kernels in which all codes have 4 bits. The general attend/codes.wgsl#code_halves
// takes a second register for every word. Combining the bits of 2^10 with an integer below 16 gives the half of their
// sum. Two such halves, four fields apart, are unpacked at once.
//
// needs: Eight, Half4
// gives: Half2, CODES, SIGNED_CODES, code_halves

alias Half2 = vec2<f16>;

// The origin to subtract so that codes 0 .. 15 remain, or the contents of their fields, which are 8 less.
const CODES: f16 = 1024h;
const SIGNED_CODES: f16 = 1032h;

// Eight neighbouring fields.
fn code_halves(fields: u32, origin: f16) -> Eight {
    let pairs = vec4<u32>(fields, fields >> 8u, fields >> 4u, fields >> 12u) & vec4<u32>(0x000f000fu);
    let halves = pairs ^ vec4<u32>(0x64086408u);
    let a = Half2(unpack2x16float(halves.x)) - origin;
    let b = Half2(unpack2x16float(halves.y)) - origin;
    let c = Half2(unpack2x16float(halves.z)) - origin;
    let d = Half2(unpack2x16float(halves.w)) - origin;
    return Eight(Half4(a.x, b.x, a.y, b.y), Half4(c.x, d.x, c.y, d.y));
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/run_values.wgsl#channel_4bit
// ----------------------------------------------------------------------------------------------------

// Values of 4 bits with a range per channel of the span: halves are codes. v = s (c + 8) + m is computed from their
// mean.
//
// needs: Eight, HEAD_DIM, KV_HEADS, TOKEN_VECTORS
// gives: ValueWord, run_value_pages, load_value, value_halves, run_output
// binds: 5 values, 6 value_span_ranges

alias ValueWord = u32;

@group(0) @binding(5) var<storage, read> values: array<vec4<u32>>;
// Scale and minimum: [range slot][KV head][channel].
@group(0) @binding(6) var<storage, read> value_span_ranges: array<vec2<f32>>;

fn run_value_pages() -> u32 {
    return arrayLength(&values) / (TOKEN_VECTORS / 4u * HEAD_DIM * KV_HEADS);
}

fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord {
    return values[(tile_base * (TOKEN_VECTORS / 4u) + vector / 4u) * HEAD_DIM + channel][vector % 4u];
}

fn value_halves(word: ValueWord, vector: u32) -> Eight {
    return code_halves(word, SIGNED_CODES);
}

fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>, share: f32) -> vec4<f32> {
    let slot = min(range_slot, arrayLength(&value_span_ranges) / (KV_HEADS * HEAD_DIM) - 1u);
    let base = (slot * KV_HEADS + kv_head) * HEAD_DIM + channel;
    var output: vec4<f32>;
    // unroll
    for (var i = 0u; i < 4u; i++) {
        let range = value_span_ranges[base + i];
        output[i] = range.x * (mean[i] + 8f * share) + range.y * share;
    }
    return output;
}

// Loads the ranges of the 16 tokens of a step, and stores them a barrier before codes become halves. Choices that read
// ranges with the codes, or have none, do nothing.
fn load_ranges(tile_base: u32, step: u32, invocation: u32) {}

fn store_ranges(invocation: u32) {}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/run_queries.wgsl#prepared
// ----------------------------------------------------------------------------------------------------

// The rows that `prepare_run_query` wrote.
//
// needs: GROUP, HEAD_DIM, Half4, Left, OWN_ROWS, QUERY_HEADS, ROW_BLOCKS, STEPS, WorkItem
// gives: first_row, load_rows, constants_of
// binds: 2 run_queries, 10 run_constants

// [KV head][prepared query][head of the group], and their constants: see attend/query_row.wgsl#f16.
@group(0) @binding(2) var<storage, read> run_queries: array<Half4>;
@group(0) @binding(10) var<storage, read> run_constants: array<vec2<f32>>;

// Unused rows behind the prepared ones.
const RUN_ROWS: u32 = 256u;
// Vectors of four of a prepared query.
const QUERY_ROW: u32 = HEAD_DIM / 4u;

// Row of the item's first query among the prepared ones of a KV head.
fn first_row(item: WorkItem, kv_head: u32) -> u32 {
    let sections = min(arrayLength(&run_constants), arrayLength(&run_queries) / QUERY_ROW);
    let prepared_queries = (sections - RUN_ROWS) / QUERY_HEADS;
    return (kv_head * prepared_queries + item.query) * GROUP;
}

fn load_rows(rows: ptr<function, array<Left, ROW_BLOCKS * STEPS>>, item: WorkItem, first: u32, team: u32, lane: u32) {
    let last = arrayLength(&run_queries) / QUERY_ROW - RUN_ROWS;
    let own = min(first, last) + team * OWN_ROWS;
    // unroll
    for (var block = 0u; block < ROW_BLOCKS; block++) {
        // unroll
        for (var step = 0u; step < STEPS; step++) {
            let at = (own + block * 16u) * QUERY_ROW + step * 4u;
            (*rows)[block * STEPS + step] = coopLoadT<Left>(&run_queries[at], QUERY_ROW);
        }
    }
}

fn constants_of(row: u32) -> vec2<f32> {
    return run_constants[min(row, arrayLength(&run_constants) - 1u)];
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/run_ends.wgsl
// ----------------------------------------------------------------------------------------------------

// What rows of `attend_run` and `attend_run_apart` leave: states that `merge_states` joins, or, where the item has all
// that its queries see, outputs and log-sum-exps.
//
// In bounds: rows of states, outputs and log-sum-exps are clamped where they are written. Rows without a query write
// nothing.
//
// needs: WorkItem, head_exists, input_row, query_head
// gives: keep_item, kept_item, end_row, write_field

// What the ends need of the item waits here: registers are short while products are summed. Vectors keep every array of
// workgroup memory at a multiple of 16 bytes, in whatever order a driver places them: products read and write rows of
// halves as such vectors.
var<workgroup> kept: array<vec4<u32>, 2>;

fn keep_item(item: WorkItem, invocation: u32) {
    if (invocation == 0u) {
        kept[0] = vec4<u32>(item.state, item.range_slot, item.row, item.states);
        kept[1] = vec4<u32>(item.queries, item.stride, 0u, 0u);
    }
}

// Behind a barrier.
fn kept_item() -> WorkItem {
    var item: WorkItem;
    item.state = kept[0].x;
    item.range_slot = kept[0].y;
    item.row = kept[0].z;
    item.states = kept[0].w;
    item.queries = kept[1].x;
    item.stride = kept[1].y;
    return item;
}

// Writes the log-sum-exp of a row, and gives the factor of its sums, and what share of the weights its tokens have: all
// but that of a sink.
fn end_row(item: WorkItem, y: u32, row: u32, weight_sum: f32, lse: f32) -> vec2<f32> {
    // A row that sees no token of the item has no weights, and a state that weighs nothing.
    let factor = select(1f, 1f / weight_sum, weight_sum > 0f);
    if (writes_states(item)) {
        write_lse_of_state(item, y, row, lse);
        return vec2<f32>(factor, 1f);
    }
    let joined = add_sink(Joined(vec4<f32>(factor, 1f, 0f, 0f), 1f, lse), query_head(y, row));
    if (head_exists(item, y, row)) {
        write_row_lse(input_row(item, y, row), joined.largest + log(joined.weight_sum));
    }
    return joined.sum.xy / joined.weight_sum;
}

// Writes four channels of a row.
fn write_field(item: WorkItem, y: u32, row: u32, field: u32, output: vec4<f32>) {
    if (!head_exists(item, y, row)) {
        return;
    }
    if (writes_states(item)) {
        write_state_field(item, y, row, field, output);
    } else {
        write_output(input_row(item, y, row) * FIELDS + field, output);
    }
}

// Of attend/lse.wgsl, by default:

fn write_row_lse(row: u32, lse: f32) {}

// Of attend/sinks.wgsl, by default:

fn add_sink(joined: Joined, query_head: u32) -> Joined {
    return joined;
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/output.wgsl#f16
// ----------------------------------------------------------------------------------------------------

// The output tensor in f16.
//
// gives: write_output
// binds: 8 outputs

@group(0) @binding(8) var<storage, read_write> outputs: array<vec2<u32>>;

fn write_output(index: u32, x: vec4<f32>) {
    outputs[min(output_at(index), arrayLength(&outputs) - 1u)] = vec2<u32>(pack2x16float(x.xy), pack2x16float(x.zw));
}

// Of attend/output_rows.wgsl, by default:

fn output_at(index: u32) -> u32 {
    return index;
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/states.wgsl#joined #states
// ----------------------------------------------------------------------------------------------------

// States that were joined: sums relative to the largest log-sum-exp.
//
// gives: NO_LSE, Joined

// Below every log-sum-exp.
const NO_LSE: f32 = -1e30f;

struct Joined {
    sum: vec4<f32>,
    weight_sum: f32,
    largest: f32,
}

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

// ----------------------------------------------------------------------------------------------------
// shaders/attend/run_states.wgsl#some
// ----------------------------------------------------------------------------------------------------

// Items with a part of what their queries see do.
//
// needs: WorkItem
// gives: writes_states, write_lse_of_state, write_state_field

fn writes_states(item: WorkItem) -> bool {
    return item.states > 0u;
}

fn write_lse_of_state(item: WorkItem, y: u32, row: u32, lse: f32) {
    write_state_lse(item, y, row, lse);
}

fn write_state_field(item: WorkItem, y: u32, row: u32, field: u32, output: vec4<f32>) {
    states[state_row(item, y, row) + field] = output;
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/merge.wgsl#later
// ----------------------------------------------------------------------------------------------------

// States that `merge_states` joins.
//
// gives: states
// binds: 7 states

@group(0) @binding(7) var<storage, read_write> states: array<vec4<f32>>;

// ----------------------------------------------------------------------------------------------------
// shaders/attend/run_arrivals.wgsl#ahead
// ----------------------------------------------------------------------------------------------------

// Loads run a whole step ahead and start once the previous loads are stored. Registers suffice if a lane holds one word
// of each, and packed words must be unpacked first anyway. With halves, four words of each, they do not suffice.
//
// needs: load_keys, load_values, store_keys, store_ranges, store_values
// gives: KEY_STEPS, before_steps, before_products, behind_products, before_weights, behind_weights

// A subgroup stores the next keys as soon as its own products are done.
const KEY_STEPS: u32 = 2u;

fn before_steps(tiles: u32, invocation: u32) {
    load_keys(1u, tiles, invocation);
    load_values(0u, tiles, invocation);
}

fn before_products(step: u32, tiles: u32, invocation: u32) {}

fn behind_products(step: u32, tiles: u32, invocation: u32) {
    store_ranges(invocation);
    store_keys(step + 1u, invocation);
    load_keys(step + 2u, tiles, invocation);
}

fn before_weights(step: u32, tiles: u32, invocation: u32) {
    store_values(step, invocation);
    load_values(step + 1u, tiles, invocation);
}

fn behind_weights(step: u32, tiles: u32, invocation: u32) {}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/run_outputs.wgsl#plain
// ----------------------------------------------------------------------------------------------------

// Outputs of the channels as they are stored: 16 channels of all rows at a time.
//
// needs: OWN_ROWS, ROW_BLOCKS, SCORE_ROW, STEPS, Sums, WorkItem, kept_factor, run_output, scores, share, write_field
// gives: write_outputs

fn write_outputs(sums: ptr<function, array<Sums, ROW_BLOCKS * STEPS>>, item: WorkItem, y: u32, team: u32, lane: u32) {
    // unroll
    for (var step = 0u; step < STEPS; step++) {
        // unroll
        for (var block = 0u; block < ROW_BLOCKS; block++) {
            let at = (team * OWN_ROWS + block * 16u) * SCORE_ROW;
            coopStoreT((*sums)[block * STEPS + step], &scores[at], SCORE_ROW);
        }
        workgroupBarrier();
        // unroll
        for (var i = 0u; i < 2u * ROW_BLOCKS; i++) {
            let own = i * 8u + lane / 4u;
            let row = team * OWN_ROWS + own;
            let mean = scores[row * SCORE_ROW + lane % 4u] * kept_factor(row);
            let field = step * 4u + lane % 4u;
            let output = run_output(item.range_slot, y, field * 4u, mean, subgroupShuffle(share, own));
            write_field(item, y, row, field, output);
        }
        workgroupBarrier();
    }
}

// ----------------------------------------------------------------------------------------------------
// shaders/attend/run_factors.wgsl#own
// ----------------------------------------------------------------------------------------------------

// In workgroup memory of their own. Nothing follows the last row of scores.
//
// needs: ROWS, ROW_SCORES, SCORE_ROW
// gives: SCORES, factors, keep_factor, kept_factor

const SCORES: u32 = ROWS * SCORE_ROW - (SCORE_ROW - ROW_SCORES);

var<workgroup> factors: array<f32, ROWS>;

fn keep_factor(row: u32, factor: f32) {
    factors[row] = factor;
}

fn kept_factor(row: u32) -> f32 {
    return factors[row];
}
