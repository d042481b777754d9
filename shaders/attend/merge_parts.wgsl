// Attention states of the same queries over parts that share no tokens, merged.

// -------- weights --------

// What a part counts, relative to the largest log-sum-exp.
//
// gives: INVOCATIONS, FIELDS, NO_LSE, weight_of
// set by plans: HEAD_DIM

const INVOCATIONS: u32 = 64u;
const HEAD_DIM: u32 = 128u;
const FIELDS: u32 = HEAD_DIM / 4u;
// Below every log-sum-exp of a part with tokens.
const NO_LSE: f32 = -1e30f;

// The weight of a part. A part without tokens has none, and NaN stays NaN.
fn weight_of(part: f32, largest: f32) -> f32 {
    return select(exp(part - largest), 0f, part < NO_LSE);
}

// -------- merge_pair --------

// merge_pair: merges the attention states of the same queries over two sets of tokens.
//
//   lse = M + ln(exp(a - M) + exp(b - M)),  output = (exp(a - M) x + exp(b - M) y) / (exp(a - M) + exp(b - M)),  M = max(a, b)
//
// of the states (a, x) and (b, y). A part with a log-sum-exp of −∞ is empty. If both parts are empty, the output is 0.
//
// One workgroup owns a row of a query head; an invocation owns every 64th channel group. Both states are read once.
//
// In bounds: workgroups past the last row return; all tensors have as many rows.
//
// binds: 0 first_outputs, 1 first_lse, 2 second_outputs, 3 second_lse, 4 outputs, 5 lse

// import attend/merge_parts.wgsl#weights

@group(0) @binding(0) var<storage, read> first_outputs: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> first_lse: array<f32>;
@group(0) @binding(2) var<storage, read> second_outputs: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> second_lse: array<f32>;
@group(0) @binding(4) var<storage, read_write> outputs: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> lse: array<f32>;

@compute @workgroup_size(64)
fn merge_pair(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let row = group.y * groups.x + group.x;
    if (row >= arrayLength(&lse)) {
        return;
    }
    let largest = max(max(first_lse[row], second_lse[row]), NO_LSE);
    let first = weight_of(first_lse[row], largest);
    let second = weight_of(second_lse[row], largest);
    let sum = first + second;
    for (var field = invocation; field < FIELDS; field += INVOCATIONS) {
        let at = row * FIELDS + field;
        // An output with weight 0 may hold anything.
        let x = select(first_outputs[at] * first, vec4<f32>(0f), first == 0f);
        let y = select(second_outputs[at] * second, vec4<f32>(0f), second == 0f);
        outputs[at] = select((x + y) / sum, vec4<f32>(0f), sum == 0f);
    }
    if (invocation == 0u) {
        lse[row] = select(largest + log(sum), first_lse[row], sum == 0f);
    }
}

// -------- merge_parts --------

// merge_parts: merges the attention states of the same queries over parts that share no tokens.
//
//   output = Σ_p exp(lse_p - M) o_p / Σ_p exp(lse_p - M),  lse = M + ln Σ_p exp(lse_p - M),  M = max lse_p
//
// Parts lie one after the other, and count in their order. A part with a log-sum-exp of −∞ is empty: it has no weight,
// and its output may be NaN. If all parts are empty, the output is 0.
//
// One workgroup owns a row of a query head; an invocation owns every 64th channel group. Every state is read once,
// every log-sum-exp twice.
//
// In bounds: workgroups past the last row return. The bound log-sum-exps are those of all parts, so that a row is one of
// `parts` rows of as many outputs; outputs of the result are clamped to their tensor, and its log-sum-exps have one for
// each row. The number of parts is an argument, at least 1.
//
// binds: 0 call, 1 part_outputs, 2 part_lse

// import output = attend/output.wgsl#f32
// import lse = attend/lse.wgsl
// import attend/merge_parts.wgsl#weights

struct Call {
    parts: u32,
}

@group(0) @binding(0) var<storage, read> call: Call;
// [part][row][query head][field] and [part][row][query head]
@group(0) @binding(1) var<storage, read> part_outputs: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> part_lse: array<f32>;

@compute @workgroup_size(64)
fn merge_parts(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let rows = arrayLength(&part_lse) / call.parts;
    let row = group.y * groups.x + group.x;
    if (row >= rows) {
        return;
    }
    var largest = NO_LSE;
    for (var part = 0u; part < call.parts; part++) {
        largest = max(largest, part_lse[part * rows + row]);
    }
    var weights = 0f;
    for (var part = 0u; part < call.parts; part++) {
        weights += weight_of(part_lse[part * rows + row], largest);
    }
    for (var field = invocation; field < FIELDS; field += INVOCATIONS) {
        var sum = vec4<f32>(0f);
        for (var part = 0u; part < call.parts; part++) {
            let at = part * rows + row;
            let weight = weight_of(part_lse[at], largest);
            // An output with weight 0 may hold anything.
            sum += select(part_outputs[at * FIELDS + field] * weight, vec4<f32>(0f), weight == 0f);
        }
        write_output(row * FIELDS + field, select(sum / weights, vec4<f32>(0f), weights == 0f));
    }
    if (invocation == 0u) {
        write_row_lse(row, select(largest + log(weights), part_lse[row], weights == 0f));
    }
}
