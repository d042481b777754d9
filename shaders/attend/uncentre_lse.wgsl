// uncentre_lse: turns log-sum-exps over centred keys into those over the original keys.
//
//   lse = lse + q·m · scale
//
// One invocation owns a query of a query head, and reads its row and the centre. A log-sum-exp of −∞ (no tokens) stays.
//
// In bounds: invocations past the last log-sum-exp return; there are as many as queries of query heads, and as many
// slots as queries, all below those of the centres: checked when they were bound, and the slots lie in a buffer of the
// call's own. Loops are bounded by HEAD_DIM; divisors are sizes of a checked shape.
//
// binds: 0 call, 1 centres, 3 lse
// set by plans: HEAD_DIM

// import pack/flat.wgsl
// import input = attend/input.wgsl#f32

struct Call {
    query_heads: u32,
    kv_heads: u32,
    // 1 / √head_dim.
    scale: f32,
    // The slot of the centre of every query.
    slots: array<u32>,
}

@group(0) @binding(0) var<storage, read> call: Call;
@group(0) @binding(1) var<storage, read> centres: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> lse: array<f32>;

const HEAD_DIM: u32 = 128u;
const FIELDS: u32 = HEAD_DIM / 4u;
// Below every log-sum-exp of a state with tokens.
const NO_LSE: f32 = -1e30f;

@compute @workgroup_size(64)
fn uncentre_lse(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let index = flat_index(group, groups, invocation);
    if (index >= arrayLength(&lse) || lse[index] < NO_LSE) {
        return;
    }
    let kv_head = index % call.query_heads / (call.query_heads / call.kv_heads);
    let centre = (call.slots[index / call.query_heads] * call.kv_heads + kv_head) * FIELDS;
    var product = 0f;
    for (var field = 0u; field < FIELDS; field++) {
        product += dot(input4(index * FIELDS + field), centres[centre + field]);
    }
    lse[index] = lse[index] + product * call.scale;
}
