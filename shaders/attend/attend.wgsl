// attend: attention states of packed or f16 keys and values, fused and split over tokens.
//
//   s_t = q · k_t / √D (as prepared),  lse = ln Σ exp(s_t),  output = Σ exp(s_t - lse) v_t
//
// over the tokens of one work item, for one KV head and up to HEADS of its query heads. If keys are not rotated, the
// query is prepared here (query.wgsl#own, query.wgsl#own_f32). If there are few items, their states are merged here
// (attend/merge.wgsl#last). Otherwise `prepare_query` and `merge_states` do this.
//
// attend/work_item.wgsl describes the invocations, attend/softmax_loop.wgsl the loop, attend/step_scores.wgsl the keys,
// attend/values.wgsl and attend/products.wgsl#value_dots the values. Keys and values are read once per chunk of query
// heads, 16 bytes per lane, coalesced. Workgroup memory holds the query rows (and 16 rows of bytes per step and head
// where keys have ranges of groups, which may share the memory of the weights: attend/query_bytes.wgsl), the weights of
// one step, 512 · HEADS bytes for sums, and 8 · HEAD_DIM for ranges of values.
//
// In bounds: what items, page table and tables of states hold is clamped to what is bound, so that they may hold
// anything (docs/in-bounds.md); lanes beyond HEAD_DIM clamp their channel, teams without a tile read ranges of the
// last; local arrays have constant indices. An item has at least one tile, and at most MAX_TILES, which is at most
// INVOCATIONS. Loops are bounded by an item's tiles and a sequence's states. Divisors are constants, sums of weights,
// of which the largest is 1, or kept from 0.

// import numbering = attend/numbering.wgsl#local
// import attend/work_item.wgsl
// import step_scores = attend/step_scores.wgsl#dot
// import attend/softmax_loop.wgsl

@compute @workgroup_size(128)
fn attend(@builtin(workgroup_id) group: vec3<u32>, numbering: Numbering) {
    if (!has_item(group)) {
        return;
    }
    attend_item(item_of(group), group.x, number(numbering));
}
