// The loop that `attend` and `weighted_values` share: online softmax of the scores of a work item and the weighted sum
// of its values. Two barriers per step of four tiles (512 tokens):
//
//   scores of the own tile -> maximum over the step | weights p = exp2(score - maximum) -> workgroup memory | values
//
// Scores are in units of log2. The running maximum and sum are kept by every invocation, the sum for its own tokens
// only. A step's sums of values are made relative to the *step's* maximum and enter the running sums through
// exp2(step maximum - running maximum): weights are integers where values are packed, and an integer relative to a
// running maximum would lose everything beside one large score.

// import common/ordered.wgsl
// import workgroup_max = common/workgroup_max_atomic.wgsl

// Maxima of the step, by head: two sets, so that one can be reset while the other is in use.
var<workgroup> step_maxima: array<atomic<u32>, 2u * HEADS>;
var<workgroup> sum_parts: array<f32, HEADS * INVOCATIONS>;

var<private> running_max: array<f32, HEADS>;
var<private> weight_sum: array<f32, HEADS>;
// What running sums are multiplied with, and what the step's sums are multiplied with, to be relative to the new
// running maximum.
var<private> keep: array<f32, HEADS>;
var<private> enter: array<f32, HEADS>;
// Weights of the invocation's tokens relative to the step's maximum: [head][token].
var<private> weights: array<f32, HEADS * LANE_TOKENS>;

// import values = common/values_dot.wgsl
// import common/states.wgsl

fn attend_item(item: WorkItem, y: u32, invocation: u32) {
    let lane = invocation % 32u;
    let team = invocation / 32u;
    let tiles = (item.tokens + TILE_TOKENS - 1u) / TILE_TOKENS;

    load_tile_bases(item.page_offset, tiles, y / CHUNKS, invocation);
    load_query(item, y, invocation);
    prepare_workgroup_max();
    if (invocation < 2u * HEADS) {
        atomicStore(&step_maxima[invocation], 0u);
    }
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        running_max[head] = LOWEST;
        weight_sum[head] = 0f;
    }
    begin_values(invocation);
    workgroupBarrier();

    var parity = 0u;
    for (var first = 0u; first < tiles; first += STEP_TILES) {
        score_own_tile(item, first + team, tiles, lane);
        // unroll
        for (var head = 0u; head < HEADS; head++) {
            let own = max(max(token_scores[head * 4u], token_scores[head * 4u + 1u]), max(token_scores[head * 4u + 2u], token_scores[head * 4u + 3u]));
            let entered = largest_to_enter(own);
            if (enters()) {
                atomicMax(&step_maxima[parity * HEADS + head], ordered(entered));
            }
        }
        enter_value_ranges(parity);
        workgroupBarrier();

        // unroll
        for (var head = 0u; head < HEADS; head++) {
            let step_max = from_ordered(atomicLoad(&step_maxima[parity * HEADS + head]));
            let new_max = max(running_max[head], step_max);
            keep[head] = exp2(running_max[head] - new_max);
            enter[head] = exp2(step_max - new_max);
            running_max[head] = new_max;
            var own_sum = 0f;
            // unroll
            for (var i = 0u; i < LANE_TOKENS; i++) {
                weights[head * LANE_TOKENS + i] = exp2(token_scores[head * LANE_TOKENS + i] - step_max);
                own_sum += weights[head * LANE_TOKENS + i];
            }
            weight_sum[head] = weight_sum[head] * keep[head] + own_sum * enter[head];
        }
        if (invocation < HEADS) {
            atomicStore(&step_maxima[(1u - parity) * HEADS + invocation], 0u);
        }
        store_weights(team, lane, parity);
        workgroupBarrier();

        add_values(first, tiles, team, lane);
        parity = 1u - parity;
    }
    finish_sums(invocation);
    write_states(item, y, team, lane, invocation);
}

fn score_own_tile(item: WorkItem, tile: u32, tiles: u32, lane: u32) {
    if (tile >= tiles) {
        set_scores_lowest();
        skip_value_ranges();
        return;
    }
    score_tile(item, tile, lane);
    load_value_ranges(tile_bases[tile], lane);
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

// Leaves the sum of all weights of a head in its first `sum_parts`.
fn finish_sums(invocation: u32) {
    // unroll
    for (var head = 0u; head < HEADS; head++) {
        sum_parts[head * INVOCATIONS + invocation] = weight_sum[head];
    }
    for (var half = INVOCATIONS / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (invocation < half) {
            // unroll
            for (var head = 0u; head < HEADS; head++) {
                sum_parts[head * INVOCATIONS + invocation] += sum_parts[head * INVOCATIONS + invocation + half];
            }
        }
    }
    workgroupBarrier();
}
