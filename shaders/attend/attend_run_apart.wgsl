// attend_run_apart: `attend_run`, in which the subgroups do not wait for each other before they compute weights.
//
// Scores and weights of a subgroup pass through workgroup memory of its own, so that only its lanes wait for each
// other. The subgroups wait for all others once in a step, if there is room for the keys and values of two steps, and
// otherwise twice. Lanes l and l + 16 of a subgroup compute the weights of row l of every block, each of eight tokens of
// a step. Each invocation loads its part of the step after next and stores what it loaded before, when its products are
// done.
//
// This is faster than `attend_run` where a subgroup has one block of rows, and where two workgroups share a
// multiprocessor. Where registers leave room for eight subgroups alone it is slower.
//
// What lanes write for each other lies between subgroup barriers. wgpu has them on Vulkan alone
// (`Features::SUBGROUP_BARRIER`).
//
// Memory and bounds are those of `attend_run`. The reference of a row moves when its subgroup votes for it. Only then do
// the two lanes of a row exchange their largest scores.
//
// gives: SCORE_ROW, BLOCK_SCORES, scores, row_weights, factors, shares
// set by plans: SCORE_ROW, TILE_BUFFERS

// import attend/run_tiles.wgsl
// import attend/run_ends.wgsl
// import run_outputs = attend/run_outputs.wgsl#apart

// A row of scores in workgroup memory, in vectors of four: products of a block are stored to it without conflicts of
// banks, and read so in the order of `lane_vector`.
const SCORE_ROW: u32 = 6u;
// Vectors of four scores of a lane, and of a block.
const LANE_SCORES: u32 = 2u;
const BLOCK_SCORES: u32 = 16u * SCORE_ROW;
const VALUES_OF_STEP: u32 = HEAD_DIM * VALUE_ROW;
// Steps whose keys and values have room in workgroup memory: 1 or 2.
const TILE_BUFFERS: u32 = 2u;

// [step][token][channel], [step][channel][token], [subgroup][row of a block][token], [row][token].
var<workgroup> key_tile: array<Half4, TILE_BUFFERS * KEYS_OF_STEP>;
var<workgroup> value_tile: array<Half4, TILE_BUFFERS * VALUES_OF_STEP>;
var<workgroup> scores: array<vec4<f32>, SUBGROUPS * BLOCK_SCORES>;
var<workgroup> row_weights: array<Half4, ROWS * WEIGHT_ROW>;

// For the lane's row of every block: the tokens of the item that it sees, the factor of its products, the reference,
// the factor of its sums when the reference moves, the sum of the lane's weights, and at the end the factor of its sums
// and the weights of its tokens, without a sink.
var<private> row_tokens: array<u32, ROW_BLOCKS>;
var<private> unit: array<f32, ROW_BLOCKS>;
var<private> reference: array<f32, ROW_BLOCKS>;
var<private> factor: array<f32, ROW_BLOCKS>;
var<private> weight_sum: array<f32, ROW_BLOCKS>;
var<private> factors: array<f32, ROW_BLOCKS>;
var<private> shares: array<f32, ROW_BLOCKS>;

// Stores the loaded keys or values where products read them.
fn store_keys(step: u32, invocation: u32) {
    // unroll
    for (var i = 0u; i < LOADS; i++) {
        let at = i * INVOCATIONS + invocation;
        if (at < EIGHTS_OF_STEP) {
            let halves = key_halves(arriving_keys[i], at / 16u);
            let to = step % TILE_BUFFERS * KEYS_OF_STEP + at % 16u * KEY_ROW + at / 16u * 2u;
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
            let to = step % TILE_BUFFERS * VALUES_OF_STEP + at % HEAD_DIM * VALUE_ROW + at / HEAD_DIM * 2u;
            value_tile[to] = halves.low;
            value_tile[to + 1u] = halves.high;
        }
    }
}

// Multiplies the subgroup's rows with the keys of a step, and hands every lane the products of its rows. The units are
// not applied yet.
fn score(rows: ptr<function, array<Left, ROW_BLOCKS * STEPS>>, token_step: u32, team: u32, lane: u32)
    -> array<vec4<f32>, ROW_BLOCKS * LANE_SCORES> {
    let first_key = token_step % TILE_BUFFERS * KEYS_OF_STEP;
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
    var products: array<vec4<f32>, ROW_BLOCKS * LANE_SCORES>;
    // unroll
    for (var block = 0u; block < ROW_BLOCKS; block++) {
        // All lanes have read what was there.
        subgroupBarrier();
        coopStoreT(blocks[block], &scores[team * BLOCK_SCORES], SCORE_ROW);
        subgroupBarrier();
        // unroll
        for (var i = 0u; i < LANE_SCORES; i++) {
            products[block * LANE_SCORES + i] = scores[lane_scores(team, lane) + lane_vector(i, lane)];
        }
    }
    return products;
}

// Which of its two vectors a lane takes as number `i`. Vectors of rows that lie four apart are in the same banks when they
// are read, and weights of rows that lie eight apart when they are written. So their lanes begin with different ones.
fn lane_vector(i: u32, lane: u32) -> u32 {
    return i ^ (((lane / 4u) ^ (lane / 8u)) & 1u);
}

// Where the scores of a lane's tokens begin.
fn lane_scores(team: u32, lane: u32) -> u32 {
    return team * BLOCK_SCORES + lane % 16u * SCORE_ROW + lane / 16u * LANE_SCORES;
}

// Computes the weights of the step for the lane's rows. Every row sees the first `least` tokens. Whether references
// moved.
fn weigh(products: array<vec4<f32>, ROW_BLOCKS * LANE_SCORES>, step: u32, least: u32, team: u32, lane: u32) -> bool {
    let first_token = step / TILE_STEPS * TILE_TOKENS + step % TILE_STEPS * 4u + lane / 16u * LANE_SCORES;
    // Only the last tiles have tokens that a row does not see.
    let masked = (step / TILE_STEPS + 1u) * TILE_TOKENS > least;
    var s: array<vec4<f32>, ROW_BLOCKS * LANE_SCORES>;
    // unroll
    for (var i = 0u; i < ROW_BLOCKS * LANE_SCORES; i++) {
        s[i] = products[i];
    }
    if (masked) {
        // unroll
        for (var block = 0u; block < ROW_BLOCKS; block++) {
            // unroll
            for (var i = 0u; i < LANE_SCORES; i++) {
                let token = vec4<u32>(first_token + lane_vector(i, lane)) + vec4<u32>(0u, 32u, 64u, 96u);
                let sees = token < vec4<u32>(row_tokens[block]);
                s[block * LANE_SCORES + i] = select(vec4<f32>(NO_PRODUCT), s[block * LANE_SCORES + i], sees);
            }
        }
    }
    var top: array<f32, ROW_BLOCKS>;
    var far = false;
    // unroll
    for (var block = 0u; block < ROW_BLOCKS; block++) {
        let high = max(s[block * LANE_SCORES], s[block * LANE_SCORES + 1u]);
        top[block] = max(max(high.x, high.y), max(high.z, high.w)) * unit[block];
        far = far || top[block] - reference[block] > MOST_WEIGHT;
    }
    let moves = subgroupAny(far);
    if (moves) {
        // unroll
        for (var block = 0u; block < ROW_BLOCKS; block++) {
            let row_top = max(top[block], subgroupShuffleXor(top[block], 16u));
            let is_far = row_top - reference[block] > MOST_WEIGHT;
            let new_reference = select(reference[block], ceil(row_top - START_WEIGHT), is_far);
            factor[block] = exp2(reference[block] - new_reference);
            reference[block] = new_reference;
            weight_sum[block] *= factor[block];
        }
    }
    // unroll
    for (var block = 0u; block < ROW_BLOCKS; block++) {
        // The sum of the rounded weights, so that the mean of the values is exact.
        var sum = 0f;
        let to = (team * OWN_ROWS + block * 16u + lane % 16u) * WEIGHT_ROW + lane / 16u * LANE_SCORES;
        // unroll
        for (var i = 0u; i < LANE_SCORES; i++) {
            let p = Half4(exp2(s[block * LANE_SCORES + i] * unit[block] - vec4<f32>(reference[block])));
            row_weights[to + lane_vector(i, lane)] = p;
            let rounded = vec4<f32>(p);
            sum += (rounded.x + rounded.y) + (rounded.z + rounded.w);
        }
        weight_sum[block] += sum;
    }
    // Before the first step there are no sums.
    return moves && step > 0u;
}

// Multiplies the sums of the rows by their factors.
fn move_sums(sums: ptr<function, array<Sums, ROW_BLOCKS * STEPS>>, team: u32, lane: u32) {
    // unroll
    for (var step = 0u; step < STEPS; step++) {
        // unroll
        for (var block = 0u; block < ROW_BLOCKS; block++) {
            coopStoreT((*sums)[block * STEPS + step], &scores[team * BLOCK_SCORES], SCORE_ROW);
            subgroupBarrier();
            // unroll
            for (var i = 0u; i < LANE_SCORES; i++) {
                scores[lane_scores(team, lane) + i] *= factor[block];
            }
            subgroupBarrier();
            (*sums)[block * STEPS + step] = coopLoadT<Sums>(&scores[team * BLOCK_SCORES], SCORE_ROW);
            subgroupBarrier();
        }
    }
}

fn add_values(sums: ptr<function, array<Sums, ROW_BLOCKS * STEPS>>, token_step: u32, team: u32) {
    let first_value = token_step % TILE_BUFFERS * VALUES_OF_STEP;
    var p: array<Left, ROW_BLOCKS>;
    // unroll
    for (var block = 0u; block < ROW_BLOCKS; block++) {
        let at = (team * OWN_ROWS + block * 16u) * WEIGHT_ROW;
        p[block] = coopLoadT<Left>(&row_weights[at], WEIGHT_ROW);
    }
    // unroll
    for (var step = 0u; step < STEPS; step++) {
        let v = coopLoad<Right>(&value_tile[first_value + step * 16u * VALUE_ROW], VALUE_ROW);
        // unroll
        for (var block = 0u; block < ROW_BLOCKS; block++) {
            (*sums)[block * STEPS + step] = coopMultiplyAdd(p[block], v, (*sums)[block * STEPS + step]);
        }
    }
}

@compute @workgroup_size(INVOCATIONS)
fn attend_run_apart(@builtin(workgroup_id) group: vec3<u32>, numbering: Numbering) {
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
    var bias: array<f32, ROW_BLOCKS>;
    // unroll
    for (var block = 0u; block < ROW_BLOCKS; block++) {
        let row = team * OWN_ROWS + block * 16u + lane % 16u;
        let constants = constants_of(first + row);
        unit[block] = constants.x * KEY_UNIT;
        bias[block] = constants.y;
        // Each query sees one token more than the one before it, up to all of the item.
        let query = min(row / GROUP, item.later);
        row_tokens[block] = item.tokens - min(item.later - query, item.tokens);
        reference[block] = LOWEST;
        weight_sum[block] = 0f;
    }
    let least = item.tokens - min(item.later, item.tokens);
    var sums: array<Sums, ROW_BLOCKS * STEPS>;
    // unroll
    for (var i = 0u; i < ROW_BLOCKS * STEPS; i++) {
        sums[i] = Sums();
    }
    workgroupBarrier();
    load_keys(0u, tiles, invocation);
    load_values(0u, tiles, invocation);
    store_keys(0u, invocation);
    store_values(0u, invocation);
    load_keys(1u, tiles, invocation);
    load_values(1u, tiles, invocation);
    workgroupBarrier();
    for (var step = 0u; step < tiles * TILE_STEPS; step++) {
        let products = score(&rows, step, team, lane);
        if (weigh(products, step, least, team, lane)) {
            move_sums(&sums, team, lane);
        }
        subgroupBarrier();
        add_values(&sums, step, team);
        if (TILE_BUFFERS == 1u) {
            workgroupBarrier();
        }
        store_keys(step + 1u, invocation);
        store_values(step + 1u, invocation);
        load_keys(step + 2u, tiles, invocation);
        load_values(step + 2u, tiles, invocation);
        workgroupBarrier();
    }
    // unroll
    for (var block = 0u; block < ROW_BLOCKS; block++) {
        let total = weight_sum[block] + subgroupShuffleXor(weight_sum[block], 16u);
        let lse = (reference[block] + log2(total) + bias[block]) * LN_2;
        let end = end_row(kept_item(), y, team * OWN_ROWS + block * 16u + lane % 16u, total, lse);
        factors[block] = end.x;
        shares[block] = end.y;
    }
    write_outputs(&sums, kept_item(), y, team, lane);
}
