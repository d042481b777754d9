// Copies of tokens: those that are kept, or all chunk by chunk in another order.

// -------- gather --------

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

// -------- reorder_chunks --------

// reorder_chunks: tokens chunk by chunk in another order. Tokens after the last whole chunk stay in place.
//
//   reordered[head][i · C + j] = rows[order[i] · C + j][head],  C = chunk_tokens
//
// One invocation owns one word of the result; neighbours own neighbours, so rows are read and written coalesced.
//
// In bounds: as in gather; the order was checked to name every chunk once.

// import pack/flat.wgsl
// import select/rows.wgsl#move_rows

@compute @workgroup_size(64)
fn reorder_chunks(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let word = flat_index(group, groups, invocation);
    let row = word / ROW_WORDS;
    if (row >= call.count * call.kv_heads) {
        return;
    }
    let place = row % call.count;
    let chunk = place / call.chunk_tokens;
    var token = place;
    if (chunk < call.chunks) {
        token = min(indices[chunk] * call.chunk_tokens + place % call.chunk_tokens, call.tokens - 1u);
    }
    moved[word] = row_word(token, row / call.count, word % ROW_WORDS);
}
