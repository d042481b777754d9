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

// import common/ordered.wgsl#ordered
// import common/ordered.wgsl#larger
// import workgroup_max = attend/workgroup_max.wgsl
// import logits = attend/logits.wgsl
// import values = attend/values.wgsl#dot
// import attend/states.wgsl#states

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
