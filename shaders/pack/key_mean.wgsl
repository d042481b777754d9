// key_mean: the mean of some keys, as the centre of a sequence.
//
//   m = (k_1 + … + k_n) · 1 / n
//
// One invocation owns one channel of a KV head and adds its elements in token order; neighbours own neighbouring channels, so that
// rows are read coalesced. Elements that are not finite, or beyond `largest`, count as 0. `call.range_slot` is the slot of the
// centre, `call.shrink` is 1 / n, rounded on the host as divisions here need not be.
//
// In bounds: invocations beyond `total` = kv_heads · head_dim return; the slot and the rows of the tokens were checked against
// the buffers when they were bound. The loop is bounded by the tokens of the call; divisors are sizes of a checked shape.
//
// binds: 7 centres

// import pack/flat.wgsl
// import pack/call.wgsl
// import rows = pack/rows/f32.wgsl

@group(0) @binding(7) var<storage, read_write> centres: array<f32>;

@compute @workgroup_size(64)
fn key_mean(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let index = flat_index(group, groups, invocation);
    if (index >= call.total) {
        return;
    }
    let kv_head = index / call.head_dim;
    let channel = index % call.head_dim;
    var sum = 0f;
    for (var token = 0u; token < call.tokens; token++) {
        // Compared as integers, since compilers may assume that no float is NaN.
        let bits = element_bits(row_start(token, kv_head) + channel);
        if ((bits & 0x7fffffffu) <= bitcast<u32>(call.largest)) {
            sum += bitcast<f32>(bits);
        }
    }
    centres[call.range_slot * call.total + index] = sum * call.shrink;
}
