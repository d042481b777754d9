// Slot `run_outputs`: the outputs of the rows of `attend_run`, from the sums in registers.
//
// Every choice has
//   fn write_outputs(sums: ptr<function, array<Sums, ROW_BLOCKS * STEPS>>, item: WorkItem, y: u32, team: u32, lane: u32)
//     of the subgroup's rows, whose factors of sums are kept, and whose weights of tokens are in `share` or `shares`; by
//     all subgroups

// -------- apart --------

// The same in `attend_run_apart`: 16 channels of a block of rows at a time. Lanes l and l + 16 have the factor of row l
// of every block.
//
// needs: BLOCK_SCORES, OWN_ROWS, ROW_BLOCKS, SCORE_ROW, STEPS, Sums, WorkItem, factors, run_output, scores, shares,
//   write_field
// gives: write_outputs

fn write_outputs(sums: ptr<function, array<Sums, ROW_BLOCKS * STEPS>>, item: WorkItem, y: u32, team: u32, lane: u32) {
    // unroll
    for (var block = 0u; block < ROW_BLOCKS; block++) {
        // unroll
        for (var step = 0u; step < STEPS; step++) {
            subgroupBarrier();
            coopStoreT((*sums)[block * STEPS + step], &scores[team * BLOCK_SCORES], SCORE_ROW);
            subgroupBarrier();
            // unroll
            for (var i = 0u; i < 2u; i++) {
                let own = i * 8u + lane / 4u;
                let factor = subgroupShuffle(factors[block], own);
                let share = subgroupShuffle(shares[block], own);
                let mean = scores[team * BLOCK_SCORES + own * SCORE_ROW + lane % 4u] * factor;
                let field = step * 4u + lane % 4u;
                let row = team * OWN_ROWS + block * 16u + own;
                write_field(item, y, row, field, run_output(item.range_slot, y, field * 4u, mean, share));
            }
        }
    }
}

// -------- plain --------

// Outputs of the channels as they are stored: 16 channels of all rows at a time.
//
// needs: OWN_ROWS, ROW_BLOCKS, SCORE_ROW, STEPS, Sums, WorkItem, kept_factor, run_output, scores, share, write_field
// gives: write_outputs

fn write_outputs(sums: ptr<function, array<Sums, ROW_BLOCKS * STEPS>>, item: WorkItem, y: u32, team: u32, lane: u32) {
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
            let own = i * 8u + lane / 4u;
            let row = team * OWN_ROWS + own;
            let mean = scores[row * SCORE_ROW + lane % 4u] * kept_factor(row);
            let field = step * 4u + lane % 4u;
            let output = run_output(item.range_slot, y, field * 4u, mean, subgroupShuffle(share, own));
            write_field(item, y, row, field, output);
        }
        workgroupBarrier();
    }
}

// -------- rotated --------

// Outputs of rotated values, rotated back: a lane takes all channels of a row into its registers.
//
// needs: OWN_ROWS, ROW_BLOCKS, ROW_SCORES, SCORE_ROW, STEPS, Sums, WorkItem, kept_factor, run_output, scores, share,
//   write_field
// gives: write_outputs

// import common/rotation.wgsl#rotate_vectors

fn write_outputs(sums: ptr<function, array<Sums, ROW_BLOCKS * STEPS>>, item: WorkItem, y: u32, team: u32, lane: u32) {
    let own = team * OWN_ROWS + lane % OWN_ROWS;
    let factor = kept_factor(own);
    var row: array<vec4<f32>, ROW_VECTORS>;
    // unroll
    for (var step = 0u; step < STEPS; step++) {
        // unroll
        for (var block = 0u; block < ROW_BLOCKS; block++) {
            let at = (team * OWN_ROWS + block * 16u) * SCORE_ROW;
            coopStoreT((*sums)[block * STEPS + step], &scores[at], SCORE_ROW);
        }
        workgroupBarrier();
        // unroll
        for (var i = 0u; i < ROW_SCORES; i++) {
            let mean = scores[own * SCORE_ROW + i] * factor;
            let output = run_output(item.range_slot, y, (step * 4u + i) * 4u, mean, share);
            row[step * 4u + i] = vec4<f32>(scaled_input(output.x), scaled_input(output.y), scaled_input(output.z),
                scaled_input(output.w));
        }
        workgroupBarrier();
    }
    rotate_vectors(&row);
    if (lane < OWN_ROWS) {
        // unroll
        for (var i = 0u; i < ROW_VECTORS; i++) {
            let v = row[i];
            write_field(item, y, own, i, vec4<f32>(unflipped(v.x, i * 4u), unflipped(v.y, i * 4u + 1u),
                unflipped(v.z, i * 4u + 2u), unflipped(v.w, i * 4u + 3u)));
        }
    }
}

// -------- rotated_apart --------

// The same in `attend_run_apart`.
//
// needs: BLOCK_SCORES, OWN_ROWS, ROW_BLOCKS, ROW_SCORES, SCORE_ROW, STEPS, Sums, WorkItem, factors, run_output, scores,
//   shares, write_field
// gives: write_outputs

// import common/rotation.wgsl#rotate_vectors

fn write_outputs(sums: ptr<function, array<Sums, ROW_BLOCKS * STEPS>>, item: WorkItem, y: u32, team: u32, lane: u32) {
    let own = team * OWN_ROWS + lane % OWN_ROWS;
    let own_block = lane % OWN_ROWS / 16u;
    let factor = select(factors[0], factors[ROW_BLOCKS - 1u], own_block > 0u);
    let share = select(shares[0], shares[ROW_BLOCKS - 1u], own_block > 0u);
    var row: array<vec4<f32>, ROW_VECTORS>;
    // unroll
    for (var step = 0u; step < STEPS; step++) {
        var means: array<vec4<f32>, ROW_SCORES>;
        // unroll
        for (var block = 0u; block < ROW_BLOCKS; block++) {
            subgroupBarrier();
            coopStoreT((*sums)[block * STEPS + step], &scores[team * BLOCK_SCORES], SCORE_ROW);
            subgroupBarrier();
            // unroll
            for (var i = 0u; i < ROW_SCORES; i++) {
                let mean = scores[team * BLOCK_SCORES + lane % 16u * SCORE_ROW + i] * factor;
                means[i] = select(means[i], mean, own_block == block);
            }
        }
        // unroll
        for (var i = 0u; i < ROW_SCORES; i++) {
            let output = run_output(item.range_slot, y, (step * 4u + i) * 4u, means[i], share);
            row[step * 4u + i] = vec4<f32>(scaled_input(output.x), scaled_input(output.y), scaled_input(output.z),
                scaled_input(output.w));
        }
    }
    rotate_vectors(&row);
    if (lane < OWN_ROWS) {
        // unroll
        for (var i = 0u; i < ROW_VECTORS; i++) {
            let v = row[i];
            write_field(item, y, own, i, vec4<f32>(unflipped(v.x, i * 4u), unflipped(v.y, i * 4u + 1u),
                unflipped(v.z, i * 4u + 2u), unflipped(v.w, i * 4u + 3u)));
        }
    }
}
