// normalize_kept: the kept keys of every KV head, divided by their norms.
//
//   units[head][i] = key / ‖key‖, or 0 of a key of zeros
//
// One workgroup owns a kept key. Its invocations own every 64th channel, and the norm is summed over them in a fixed
// order.
//
// In bounds: workgroups beyond kept · kv_heads return; tokens are clamped; buffers were checked when they were bound.
//
// binds: 2 kept_tokens, 3 units
// set by plans: HEAD_DIM

// import select/calls.wgsl#merge_call

@group(0) @binding(2) var<storage, read> kept_tokens: array<u32>;
// [kv_head][kept][HEAD_DIM].
@group(0) @binding(3) var<storage, read_write> units: array<f32>;

const HEAD_DIM: u32 = 128u;
const INVOCATIONS: u32 = 64u;

var<workgroup> squares: array<f32, INVOCATIONS>;

@compute @workgroup_size(64)
fn normalize_kept(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let row = group.y * groups.x + group.x;
    if (row >= call.kept * call.kv_heads) {
        return;
    }
    let start = row_start(kept_tokens[row], row / call.kept);
    var square = 0f;
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        let x = element(start + channel);
        square += x * x;
    }
    squares[invocation] = square;
    workgroupBarrier();
    for (var distance = INVOCATIONS / 2u; distance > 0u; distance /= 2u) {
        if (invocation < distance) {
            squares[invocation] += squares[invocation + distance];
        }
        workgroupBarrier();
    }
    var inverse = 0f;
    if (squares[0] > 0f) {
        inverse = inverseSqrt(squares[0]);
    }
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        units[row * HEAD_DIM + channel] = element(start + channel) * inverse;
    }
}
