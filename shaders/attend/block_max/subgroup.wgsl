// Largest values over a block of eight lanes, by shuffles: invocations are numbered subgroup by subgroup (see
// attend/numbering/subgroup.wgsl), and subgroups have at least 4 * BLOCK_STRIDE lanes.
//
// needs: BLOCK_MAXIMA, BLOCK_STRIDE
// gives: enter_block_max, block_max

// One for each of BLOCK_MAXIMA.
var<private> block_maxima: array<f32, BLOCK_MAXIMA>;

fn enter_block_max(at: u32, own: f32, parity: u32, team: u32, lane: u32) {
    var largest = max(own, subgroupShuffleXor(own, 1u));
    largest = max(largest, subgroupShuffleXor(largest, BLOCK_STRIDE));
    block_maxima[at] = max(largest, subgroupShuffleXor(largest, 2u * BLOCK_STRIDE));
}

fn block_max(at: u32, parity: u32, team: u32, lane: u32) -> f32 {
    return block_maxima[at];
}
