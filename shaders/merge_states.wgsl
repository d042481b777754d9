// merge_states: joins the attention states of a sequence's work items and writes the attention output.
//
//   output = Σ_i exp(lse_i - M) o_i / Σ_i exp(lse_i - M),  M = max lse_i
//
// Workgroup (x, y): sequence x, query head y. An invocation owns four channels of every LISTS-th state; the lists are
// joined in workgroup memory in a fixed order, so that two runs agree to the bit. Every state is read once.
//
// In bounds: the states of a sequence are those of the plan; surplus invocations own a list index past LISTS and read
// nothing. The divisor is at least 1.

@group(0) @binding(0) var<storage, read> first_state: array<u32>;
@group(0) @binding(7) var<storage, read> states: array<vec4<f32>>;

const INVOCATIONS: u32 = 128u;
const HEAD_DIM: u32 = 128u;
const QUERY_HEADS: u32 = 32u;
const FIELDS: u32 = HEAD_DIM / 4u;
const LISTS: u32 = INVOCATIONS / FIELDS;
// States of a list whose loads are under way together.
const AT_ONCE: u32 = 4u;
const STATE_ROW: u32 = FIELDS + 1u;

// import output = common/output_f32.wgsl

var<workgroup> list_sums: array<vec4<f32>, INVOCATIONS>;
var<workgroup> list_weights: array<f32, INVOCATIONS>;

// The largest log-sum-exp of the states begin .. end of a query head.
fn largest_lse(begin: u32, end: u32, query_head: u32, invocation: u32) -> f32 {
    var largest = states[(begin * QUERY_HEADS + query_head) * STATE_ROW + FIELDS].x;
    for (var state = begin + invocation; state < end; state += INVOCATIONS) {
        largest = max(largest, states[(state * QUERY_HEADS + query_head) * STATE_ROW + FIELDS].x);
    }
    list_weights[invocation] = largest;
    for (var half = INVOCATIONS / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (invocation < half) {
            list_weights[invocation] = max(list_weights[invocation], list_weights[invocation + half]);
        }
    }
    workgroupBarrier();
    largest = list_weights[0];
    workgroupBarrier();
    return largest;
}

@compute @workgroup_size(128)
fn merge_states(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) invocation: u32) {
    let begin = first_state[group.x];
    let end = first_state[group.x + 1u];
    let list = invocation / FIELDS;
    let field = invocation % FIELDS;
    let largest = largest_lse(begin, end, group.y, invocation);
    var sum = vec4<f32>(0f);
    var weight_sum = 0f;
    if (list < LISTS) {
        for (var first = begin + list; first < end; first += LISTS * AT_ONCE) {
            // unroll
            for (var i = 0u; i < AT_ONCE; i++) {
                let state = first + i * LISTS;
                let row = (min(state, end - 1u) * QUERY_HEADS + group.y) * STATE_ROW;
                let weight = select(0f, exp(states[row + FIELDS].x - largest), state < end);
                sum += states[row + field] * weight;
                weight_sum += weight;
            }
        }
    }
    list_sums[invocation] = sum;
    list_weights[invocation] = weight_sum;
    workgroupBarrier();
    if (invocation < FIELDS) {
        // unroll
        for (var other = 0u; other < LISTS - 1u; other++) {
            sum += list_sums[(other + 1u) * FIELDS + field];
            weight_sum += list_weights[(other + 1u) * FIELDS + field];
        }
        write_output((group.x * QUERY_HEADS + group.y) * FIELDS + field, sum / weight_sum);
    }
}
