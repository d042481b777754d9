// uncentre_keys: adds the centre of their sequence back to keys in dense f32 rows [kv_head][token][channel], in place.
//
// One invocation owns one element; neighbours own neighbouring channels. `call.range_slot` is the slot of the centre.
//
// In bounds: invocations beyond `total` = kv_heads · tokens · head_dim return; the slot and the output were checked
// against the buffers when they were bound. Divisors are sizes of a checked shape, and the tokens of a span, of which
// there is one at least.
//
// binds: 2 output, 7 centres

// import pack/flat.wgsl
// import pack/call.wgsl

@group(0) @binding(2) var<storage, read_write> output: array<f32>;
@group(0) @binding(7) var<storage, read> centres: array<f32>;

@compute @workgroup_size(64)
fn uncentre_keys(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let index = flat_index(group, groups, invocation);
    if (index >= call.total) {
        return;
    }
    let kv_head = index / call.head_dim / call.tokens;
    let centre = (call.range_slot * call.kv_heads + kv_head) * call.head_dim;
    output[index] = output[index] + centres[centre + index % call.head_dim];
}
