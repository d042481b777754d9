// centre_keys: subtracts the centre of their sequence from keys of a dense tensor, rotates them if the format does, and
// writes dense f32 rows [token][kv_head][channel].
//
// One workgroup owns a row; an invocation owns every 64th channel. Rows are read and written coalesced.
// `call.range_slot` is the slot of the centre.
//
// In bounds: workgroups beyond `total` = tokens · kv_heads rows return; the slot, the rows read and the output
// were checked against the buffers when they were bound. Loops are bounded by HEAD_DIM; divisors are sizes of
// a checked shape.
//
// gives: output, INVOCATIONS, HEAD_DIM
// binds: 2 output, 7 centres
// set by plans: HEAD_DIM

// import pack/call.wgsl
// import rows = pack/rows.wgsl#f32
// import row = pack/row.wgsl#plain

@group(0) @binding(2) var<storage, read_write> output: array<f32>;
@group(0) @binding(7) var<storage, read> centres: array<f32>;

const INVOCATIONS: u32 = 64u;
const HEAD_DIM: u32 = 128u;

@compute @workgroup_size(64)
fn centre_keys(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let index = group.y * groups.x + group.x;
    if (index >= call.total) {
        return;
    }
    let kv_head = index % call.kv_heads;
    let start = row_start(index / call.kv_heads, kv_head);
    let centre = (call.range_slot * call.kv_heads + kv_head) * HEAD_DIM;
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        put_channel(channel, element(start + channel) - centres[centre + channel]);
    }
    finish_row(invocation);
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        output[index * HEAD_DIM + channel] = channel_value(channel);
    }
}
