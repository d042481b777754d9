// What rows of `attend_run` and `attend_run_apart` leave: states that `merge_states` joins, or, where the item has all
// that its queries see, outputs and log-sum-exps.
//
// In bounds: rows of states, outputs and log-sum-exps are clamped where they are written. Rows without a query write
// nothing.
//
// needs: FIELDS, WorkItem, head_exists, input_row, query_head, state_row, states, write_state_lse
// gives: keep_item, kept_item, end_row, write_field

// import output = attend/output.wgsl#f32
// import lse = attend/lse.wgsl
// import attend/states.wgsl#joined
// import sinks = attend/sinks.wgsl

// What the ends need of the item waits here: registers are short while products are summed.
struct KeptItem {
    state: u32,
    range_slot: u32,
    row: u32,
    states: u32,
    queries: u32,
    stride: u32,
}

var<workgroup> kept: KeptItem;

fn keep_item(item: WorkItem, invocation: u32) {
    if (invocation == 0u) {
        kept = KeptItem(item.state, item.range_slot, item.row, item.states, item.queries, item.stride);
    }
}

// Behind a barrier.
fn kept_item() -> WorkItem {
    var item: WorkItem;
    item.state = kept.state;
    item.range_slot = kept.range_slot;
    item.row = kept.row;
    item.states = kept.states;
    item.queries = kept.queries;
    item.stride = kept.stride;
    return item;
}

// Writes the log-sum-exp of a row, and gives the factor of its sums, and what share of the weights its tokens have: all
// but that of a sink.
fn end_row(item: WorkItem, y: u32, row: u32, weight_sum: f32, lse: f32) -> vec2<f32> {
    // A row that sees no token of the item has no weights, and a state that weighs nothing.
    let factor = select(1f, 1f / weight_sum, weight_sum > 0f);
    if (item.states > 0u) {
        write_state_lse(item, y, row, lse);
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
    if (item.states > 0u) {
        states[state_row(item, y, row) + field] = output;
    } else {
        write_output(input_row(item, y, row) * FIELDS + field, output);
    }
}
