// merge_states: joins the attention states of a query's work items and writes the attention output.
//
//   output = Σ_i exp(lse_i - M) o_i / Σ_i exp(lse_i - M),  M = max lse_i
//
// over the states, and a sink where the layer has them. A query that sees nothing has the output 0 and the
// log-sum-exp −∞. The output of a query with a row of WRITTEN is there already.
//
// Workgroup (x, y): row of queries x, query heads y · MERGED_HEADS onwards. An invocation owns four channels of every
// HEAD_LISTS-th state of one of them; the lists are joined in workgroup memory in a fixed order, so that two runs agree
// to the bit. Every state is read once, its
// log-sum-exp with its output: each wait for memory is a good part of what this kernel takes.
//
// In bounds: what the table of states holds is clamped to the states that are bound; surplus invocations own a list
// index past LISTS and read nothing. The divisor is at least 1: the largest weight, or 1 where there is none.
//
// gives: state_rows, states, QUERY_HEADS, FIELDS, STATE_ROW
// binds: 0 state_rows, 7 states
// set by plans: HEAD_DIM, QUERY_HEADS, MERGED_HEADS, ROW_WORDS

// import output = attend/output.wgsl#f32
// import lse = attend/lse.wgsl
// import attend/states.wgsl#join_states
// import sinks = attend/sinks.wgsl

// The states of every row: the first, where those of each buffer end if there are several, and one past the last.
@group(0) @binding(0) var<storage, read> state_rows: array<u32>;
@group(0) @binding(7) var<storage, read> states: array<vec4<f32>>;

const INVOCATIONS: u32 = 128u;
const HEAD_DIM: u32 = 128u;
const QUERY_HEADS: u32 = 32u;
const FIELDS: u32 = HEAD_DIM / 4u;
const LISTS: u32 = INVOCATIONS / FIELDS;
// Query heads of a workgroup, and lists that share the states of each.
const MERGED_HEADS: u32 = 1u;
const HEAD_LISTS: u32 = LISTS / MERGED_HEADS;
const STATE_ROW: u32 = FIELDS + 1u;
const ROW_WORDS: u32 = 2u;
const WRITTEN: u32 = 0xffffffffu;

var<workgroup> list_sums: array<vec4<f32>, INVOCATIONS>;
// Sum of weights, and the largest log-sum-exp.
var<workgroup> list_weights: array<vec2<f32>, INVOCATIONS>;

@compute @workgroup_size(128)
fn merge_states(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) invocation: u32) {
    let at = group.x * ROW_WORDS;
    let begin = state_rows[at];
    if (begin == WRITTEN) {
        return;
    }
    let end = state_rows[at + ROW_WORDS - 1u];
    find_buffers(at);
    let list = invocation / FIELDS;
    let field = invocation % FIELDS;
    let head = group.y * MERGED_HEADS + list / HEAD_LISTS;
    var joined = Joined(vec4<f32>(0f), 0f, NO_LSE);
    if (list < LISTS) {
        joined = join_states(begin + list % HEAD_LISTS, end, HEAD_LISTS, head, field);
    }
    list_sums[invocation] = joined.sum;
    list_weights[invocation] = vec2<f32>(joined.weight_sum, joined.largest);
    workgroupBarrier();
    if (list < LISTS && list % HEAD_LISTS == 0u) {
        var largest = joined.largest;
        // unroll
        for (var other = 0u; other < HEAD_LISTS - 1u; other++) {
            largest = max(largest, list_weights[invocation + (other + 1u) * FIELDS].y);
        }
        let own = exp(joined.largest - largest);
        var sum = joined.sum * own;
        var weight_sum = joined.weight_sum * own;
        // unroll
        for (var other = 0u; other < HEAD_LISTS - 1u; other++) {
            let weights = list_weights[invocation + (other + 1u) * FIELDS];
            let weight = exp(weights.y - largest);
            sum += list_sums[invocation + (other + 1u) * FIELDS] * weight;
            weight_sum += weights.x * weight;
        }
        let all = add_sink(Joined(sum, weight_sum, largest), head);
        let divisor = max(all.weight_sum, 1f);
        write_output((group.x * QUERY_HEADS + head) * FIELDS + field, all.sum / divisor);
        if (field == 0u) {
            // The bits of −∞, where the sum of weights is 0. A sum that is NaN stays, so that it weighs where parts are
            // merged; the divisor may be 1 then.
            let nothing = bitcast<f32>(0xff800000u | bitcast<u32>(all.weight_sum));
            let of_row = select(all.largest + log(all.weight_sum), nothing, all.weight_sum == 0f);
            write_row_lse(group.x * QUERY_HEADS + head, of_row);
        }
    }
}
