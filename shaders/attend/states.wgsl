// States of work items, and how they are joined.

// -------- states --------

// Attention states: [state][query head], a row of HEAD_DIM outputs and the natural log-sum-exp, padded to 16 bytes.
//
// needs: HEAD_DIM, QUERY_HEADS, WorkItem, head_exists, query_head, query_of
// gives: FIELDS, STATE_ROW, state_row, write_state_channel, write_state_lse

// import merge = attend/merge.wgsl#later
// import output_rotation = attend/output_rotation.wgsl

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

// -------- join_states --------

// Merges attention states into a running sum relative to the largest log-sum-exp so far. States are read once, AT_ONCE
// together.
//
// needs: FIELDS, QUERY_HEADS, STATE_ROW, states
// gives: join_states
// set by plans: AT_ONCE

// import attend/states.wgsl#joined
// import state_buffers = attend/state_buffers.wgsl

// Number of states whose loads are in flight together.
const AT_ONCE: u32 = 8u;

// Merges four channels of the existing states first, first + stride, ... below `wanted_end` of a query head.
fn join_states(first: u32, wanted_end: u32, stride: u32, query_head: u32, field: u32) -> Joined {
    let end = min(wanted_end, arrayLength(&states) / (QUERY_HEADS * STATE_ROW));
    var joined = Joined(vec4<f32>(0f), 0f, NO_LSE);
    for (var next = first; next < end; next += stride * AT_ONCE) {
        var outputs_read: array<vec4<f32>, AT_ONCE>;
        var lse: array<f32, AT_ONCE>;
        // unroll
        for (var i = 0u; i < AT_ONCE; i++) {
            let state = min(next + i * stride, end - 1u);
            let row = (state * QUERY_HEADS + query_head) * STATE_ROW;
            outputs_read[i] = read_state(state, row + field);
            lse[i] = select(NO_LSE, read_state(state, row + FIELDS).x, next + i * stride < end);
        }
        let before = joined.largest;
        // unroll
        for (var i = 0u; i < AT_ONCE; i++) {
            joined.largest = max(joined.largest, lse[i]);
        }
        let keep_before = exp(before - joined.largest);
        joined.sum *= keep_before;
        joined.weight_sum *= keep_before;
        // unroll
        for (var i = 0u; i < AT_ONCE; i++) {
            let weight = exp(lse[i] - joined.largest);
            joined.sum += outputs_read[i] * weight;
            joined.weight_sum += weight;
        }
    }
    return joined;
}

// -------- joined --------

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
