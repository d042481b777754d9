// attend_run: `attend` of many queries of a run together, with cooperative matrices.
//
//   s_rt = q_r · k_t / √D,  lse_r = ln Σ exp(s_rt),  output_r = Σ exp(s_rt - lse_r) v_t
//
// over the tokens of one work item. A row r is a query and one of the query heads of the item's KV head, up to ROWS of
// them, which `prepare_query` wrote in f16. Products are 16 × 16 × 16, in f16 with f32 sums. `merge_states` merges the
// items.
//
// A subgroup of 32 owns two blocks of 16 rows, or one where a row has more than 128 channels. Their queries (the left operands of scores) and their sums stay in its
// registers for the whole item. All subgroups share the tokens, which stream through in steps of 16 and are unpacked to
// halves in workgroup memory once. A step is the eight tokens of two vectors of values: those at 4 step, and 32, 64 and
// 96 further. There are two barriers per step:
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
// gives: Half4, Sums, Eight, SUBGROUPS, ROW_BLOCKS, OWN_ROWS, STEPS, EIGHTS, TOKEN_VECTORS, SCORE_ROW, ROW_SCORES,
//   scores, factors, pages, load_keys, load_values, store_keys, store_values
// binds: 2 run_queries, 8 run_constants
// set by plans: SUBGROUPS, ROW_BLOCKS

// import attend/numbering.wgsl#subgroup
// import attend/work_item.wgsl
// import attend/states.wgsl#states
// import run_keys = attend/run_keys.wgsl#f16
// import run_values = attend/run_values.wgsl#f16
// import run_arrivals = attend/run_arrivals.wgsl#by_turns
// import run_outputs = attend/run_outputs.wgsl#plain

alias Half4 = vec4<f16>;
alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sums = coop_mat16x16<f32, C>;

struct Eight {
    low: Half4,
    high: Half4,
}

// [KV head][prepared query][head of the group], and their constants: see attend/query_row.wgsl#f16.
@group(0) @binding(2) var<storage, read> run_queries: array<Half4>;
@group(0) @binding(8) var<storage, read> run_constants: array<vec2<f32>>;

const SUBGROUPS: u32 = 8u;
// Blocks of 16 rows in a subgroup, and its rows. Each of its first OWN_ROWS lanes computes the weights of one row; others
// compute the same, and write nothing.
const ROW_BLOCKS: u32 = 2u;
const OWN_ROWS: u32 = ROW_BLOCKS * 16u;
const ROWS: u32 = SUBGROUPS * OWN_ROWS;
// Unused rows behind the prepared ones.
const RUN_ROWS: u32 = 256u;

const STEPS: u32 = HEAD_DIM / 16u;
const EIGHTS: u32 = HEAD_DIM / 8u;
// Vectors of eight tokens of a tile's values, and steps of a tile.
const TOKEN_VECTORS: u32 = 16u;
const TILE_STEPS: u32 = 8u;
// Sizes in vectors of four: a prepared query; a key, a channel of values, a row of scores and a row of weights in
// workgroup memory.
const QUERY_ROW: u32 = HEAD_DIM / 4u;
const KEY_ROW: u32 = HEAD_DIM / 4u + 2u;
const KEYS_OF_STEP: u32 = 16u * KEY_ROW;
const VALUE_ROW: u32 = 6u;
const SCORE_ROW: u32 = 5u;
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

// [step][token][channel], [channel][token], [row][token], [row][token].
var<workgroup> key_tile: array<Half4, KEY_STEPS * KEYS_OF_STEP>;
var<workgroup> value_tile: array<Half4, HEAD_DIM * VALUE_ROW>;
var<workgroup> scores: array<vec4<f32>, ROWS * SCORE_ROW>;
var<workgroup> row_weights: array<Half4, ROWS * WEIGHT_ROW>;
// Factors of the sums of a row before more is added; at the end, the row's sum of weights.
var<workgroup> factors: array<f32, ROWS>;
// Whether rows of a subgroup moved their references in this step.
var<workgroup> moved: array<vec4<u32>, 4>;

// Loads of the invocation in flight.
var<private> arriving_keys: array<KeyWord, LOADS>;
var<private> arriving_values: array<ValueWord, LOADS>;

// For the lane's row: the tokens of the item that it sees, the factor of its products, the reference, and the sum of
// weights.
var<private> row_tokens: u32;
var<private> unit: f32;
var<private> reference: f32;
var<private> weight_sum: f32;

fn pages() -> u32 {
    return min(run_key_pages(), run_value_pages());
}

// Row of the item's first query among the prepared ones of a KV head.
fn first_prepared(item: WorkItem, kv_head: u32) -> u32 {
    let sections = min(arrayLength(&run_constants), arrayLength(&run_queries) / QUERY_ROW);
    let prepared_queries = (sections - RUN_ROWS) / QUERY_HEADS;
    return (kv_head * prepared_queries + item.query) * GROUP;
}

fn load_rows(rows: ptr<function, array<Left, ROW_BLOCKS * STEPS>>, first: u32, team: u32) {
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
    // unroll
    for (var i = 0u; i < LOADS; i++) {
        let at = min(i * INVOCATIONS + INVOCATIONS - 1u - invocation, EIGHTS_OF_STEP - 1u);
        arriving_values[i] = load_value(tile_base, step % TILE_STEPS * 2u + at / HEAD_DIM, at % HEAD_DIM);
    }
}

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
        factors[row] = factor;
    }
    if (lane == 0u) {
        moved[team / 4u][team % 4u] = select(0u, 1u, moves);
    }
}

fn any_moved() -> bool {
    return any((moved[0] | moved[1] | moved[2] | moved[3]) != vec4<u32>());
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
                scores[row * SCORE_ROW + i] *= factors[row];
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

    keep_tile_base(read_tile_base(item.page_offset, tiles, y, invocation), tiles, invocation);
    let first = first_prepared(item, y);
    var rows: array<Left, ROW_BLOCKS * STEPS>;
    load_rows(&rows, first, team);
    let own_row = team * OWN_ROWS + lane % OWN_ROWS;
    let constants = run_constants[min(first + own_row, arrayLength(&run_constants) - 1u)];
    unit = constants.x * KEY_UNIT;
    // Each query sees one token more than the one before it, up to all of the item.
    let query = min(own_row / GROUP, item.later);
    row_tokens = item.tokens - min(item.later - query, item.tokens);
    let least = item.tokens - min(item.later, item.tokens);
    reference = LOWEST;
    weight_sum = 0f;
    if (invocation < 4u) {
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
        factors[own_row] = weight_sum;
        write_state_lse(item, y, own_row, (reference + log2(weight_sum) + constants.y) * LN_2);
    }
    workgroupBarrier();
    write_states(&sums, item, y, team, lane);
}
