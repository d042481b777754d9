// States of the channels as they are stored: 16 channels of all rows at a time.
//
// needs: OWN_ROWS, ROW_BLOCKS, SCORE_ROW, STEPS, Sums, WorkItem, factors, head_exists, run_output, scores, state_row,
//   states
// gives: write_states

fn write_states(sums: ptr<function, array<Sums, ROW_BLOCKS * STEPS>>, item: WorkItem, y: u32, team: u32, lane: u32) {
    // unroll
    for (var step = 0u; step < STEPS; step++) {
        // unroll
        for (var block = 0u; block < ROW_BLOCKS; block++) {
            let at = (team * OWN_ROWS + block * 16u) * SCORE_ROW;
            coopStoreT((*sums)[block * STEPS + step], &scores[at], SCORE_ROW);
        }
        workgroupBarrier();
        // unroll
        for (var i = 0u; i < 2u * ROW_BLOCKS; i++) {
            let row = team * OWN_ROWS + i * 8u + lane / 4u;
            if (head_exists(item, y, row)) {
                // A row that sees no token of the item has no weights, and a state that weighs nothing.
                let weights = select(1f, factors[row], factors[row] > 0f);
                let mean = scores[row * SCORE_ROW + lane % 4u] / weights;
                let field = step * 4u + lane % 4u;
                states[state_row(item, y, row) + field] = run_output(item.range_slot, y, field * 4u, mean);
            }
        }
        workgroupBarrier();
    }
}
