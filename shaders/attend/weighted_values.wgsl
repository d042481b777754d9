// weighted_values: attention states from stored scores and packed values (CalibQuant, Algorithm 2), with calibration.
//
//   s'_t = slope · s_t + offset,  lse = ln Σ exp(s'_t),  output = Σ exp(s'_t - lse) v_t
//
// over the tokens of one work item. Slope and offset come from the extremes of the head's scores over the whole span
// (eq. 7 and 8), which `scores` left behind.
//
// Work, memory traffic, merging and bounds as in `attend`, with 4 bytes per token and query head read in
// place of the keys.

// import numbering = attend/numbering/local.wgsl
// import attend/work_item.wgsl
// import attend/scores/stored.wgsl
// import attend/softmax_loop.wgsl

@compute @workgroup_size(128)
fn weighted_values(@builtin(workgroup_id) group: vec3<u32>, numbering: Numbering) {
    attend_item(read_item(group.y), group.x, number(numbering));
}
