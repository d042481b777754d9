// What rows of `attend_run` and `attend_run_apart` leave: states that `merge_states` joins, or, where the item has all
// that its queries see, outputs and log-sum-exps.
//
// In bounds: rows of states, outputs and log-sum-exps are clamped where they are written. Rows without a query write
// nothing.
//
// needs: WorkItem, head_exists, input_row, query_head
// gives: keep_item, kept_item, end_row, write_field

// import output = attend/output.wgsl#f32
// import lse = attend/lse.wgsl
// import attend/states.wgsl#joined
// import run_states = attend/run_states.wgsl#some
// import sinks = attend/sinks.wgsl

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
