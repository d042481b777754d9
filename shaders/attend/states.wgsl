// Attention states: [state][query head], a row of HEAD_DIM outputs and the natural log-sum-exp, padded to 16 bytes.
//
// needs: HEAD_DIM, QUERY_HEADS, WorkItem, head_exists, query_head, query_of
// gives: FIELDS, STATE_ROW, state_row, write_state_channel, write_state_lse

const FIELDS: u32 = HEAD_DIM / 4u;
const STATE_ROW: u32 = FIELDS + 1u;

// import merge = attend/merge/later.wgsl

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

// import output_rotation = attend/output_rotation/slot.wgsl
