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

// import attend/run_tiles.wgsl
// import attend/run_ends.wgsl
// import run_arrivals = attend/run_arrivals.wgsl#by_turns
// import run_outputs = attend/run_outputs.wgsl#plain
// import run_factors = attend/run_factors.wgsl#own

// A row of scores in workgroup memory, in vectors of four: 6 or 5. With 6, products of a block are stored without
// conflicts of banks.
const SCORE_ROW: u32 = 6u;

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
