// Slot `mean`: the means that a dispatch computes.
//
// Every choice has
//   fn mean_count() -> u32
//   fn mean_at(index: u32) -> Mean
//     the mean of an index below that count

// -------- of_call --------

// The mean of the tokens of a call. `call.range_slot` is the slot of the centre. `call.shrink` is 1 / n, computed on
// the host because divisions here need not round correctly.
//
// needs: Mean, call
// gives: mean_count, mean_at

fn mean_count() -> u32 {
    return 1u;
}

fn mean_at(index: u32) -> Mean {
    return Mean(0u, call.tokens, call.range_slot, call.shrink);
}

// -------- of_step --------

// Means of the first tokens of sequences that begin with a step. An entry holds the first token, the bits of 1 / n, and
// a word with n and, from bit 8 on, the slot of the centre.
//
// needs: Mean
// gives: mean_count, mean_at

// import pack/step_table.wgsl

fn mean_count() -> u32 {
    return entry_count();
}

fn mean_at(index: u32) -> Mean {
    let entry = entry_at(index);
    return Mean(entry.x, entry.z & 0xffu, entry.z >> 8u, bitcast<f32>(entry.y));
}
