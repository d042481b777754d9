// hadamard: rotates rows of a dense tensor, forward or inverse, into dense f32 rows.
//
//   y = H (s ⊙ x) / √ORDER, or x = s ⊙ (H y) / √ORDER, for blocks of ORDER channels; s are signs, or all 1
//
// One workgroup owns a row; an invocation owns every 64th channel and pairs of channels. Rows are read and written
// coalesced (except that dealt channels are not written coalesced), and the output may be the input. Costs log2(ORDER)
// additions per element and as many barriers per row.
//
// In bounds: workgroups beyond `total` = tokens · kv_heads rows return; the rows read and the output were checked
// against the buffers when they were bound, pages that a step's table names when it was made for their layout. Loops
// are bounded by HEAD_DIM; divisors are sizes of a checked shape.
//
// gives: output, INVOCATIONS, HEAD_DIM
// binds: 2 output
// set by plans: HEAD_DIM

// import pack/call.wgsl
// import rows = pack/rows.wgsl#f32
// import common/rotation.wgsl#rotate_row

@group(0) @binding(2) var<storage, read_write> output: array<f32>;

const INVOCATIONS: u32 = 64u;
const HEAD_DIM: u32 = 128u;

@compute @workgroup_size(64)
fn hadamard(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let row = group.y * groups.x + group.x;
    if (row >= call.total || !has_token(row / call.kv_heads)) {
        return;
    }
    let start = row_start(row / call.kv_heads, row % call.kv_heads);
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        let place = input_place(channel);
        rotated[place] = rounded(rotation_input(element(start + channel), place));
    }
    rotate_row(invocation);
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        let place = output_place(channel);
        output[row * HEAD_DIM + channel] = unflipped(rotated[place], place);
    }
}
