// weighted_values: attention states from stored scores and packed values (CalibQuant, Algorithm 2), with calibration.
//
//   s'_t = slope · s_t + offset,  lse = ln Σ exp(s'_t),  output = Σ exp(s'_t - lse) v_t
//
// over the tokens of one work item. Slope and offset come from the extremes of the head's scores over the whole span
// (eq. 7 and 8), which `scores` wrote.
//
// Work, memory traffic, merging and bounds are as in `attend`, except that 4 bytes per token and query head are read
// instead of the keys.

// import numbering = attend/numbering.wgsl#local
// import attend/work_item.wgsl
// import attend/step_scores.wgsl#stored
// import attend/softmax_loop.wgsl

@compute @workgroup_size(128)
fn weighted_values(@builtin(workgroup_id) group: vec3<u32>, numbering: Numbering) {
    if (!has_item(group)) {
        return;
    }
    attend_item(item_of(group), group.x, number(numbering));
}
