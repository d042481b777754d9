// gather: the kept tokens of every KV head, in the order of their indices.
//
//   gathered[head][i] = rows[indices[head][i]][head]
//
// One invocation owns one word of the result; neighbours own neighbours, so rows are read and written coalesced.
//
// In bounds: invocations beyond the result return; indices are clamped to the tokens of the call; rows, indices and
// result were checked against the buffers when they were bound. Divisors are sizes of a checked shape.

// import pack/flat.wgsl
// import select/rows.wgsl#move_rows

@compute @workgroup_size(64)
fn gather(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let word = flat_index(group, groups, invocation);
    let row = word / ROW_WORDS;
    if (row >= call.count * call.kv_heads) {
        return;
    }
    let token = min(indices[row], call.tokens - 1u);
    moved[word] = row_word(token, row / call.count, word % ROW_WORDS);
}
