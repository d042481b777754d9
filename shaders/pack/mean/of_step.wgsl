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
