// Attention states: [state][query head], a row of HEAD_DIM outputs and the natural log-sum-exp, padded to 16 bytes.

const STATE_ROW: u32 = HEAD_DIM + 4u;

@group(0) @binding(7) var<storage, read_write> states: array<f32>;

fn write_state_channel(state: u32, y: u32, head: u32, channel: u32, output: f32) {
    if (head_exists(y, head)) {
        states[(state * QUERY_HEADS + query_head(y, head)) * STATE_ROW + channel] = output;
    }
}

fn write_state_lse(state: u32, y: u32, head: u32, total: f32, invocation: u32) {
    if (invocation == 0u && head_exists(y, head)) {
        states[(state * QUERY_HEADS + query_head(y, head)) * STATE_ROW + HEAD_DIM] =
            (running_maxima[last_parity * HEADS + head] + log2(total)) * LN_2;
    }
}

// import output_rotation = common/output_rotation_none.wgsl
