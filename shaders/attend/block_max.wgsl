// Slot `block_max`: largest values over a block of eight lanes (values.wgsl#byte), BLOCK_MAXIMA of them in every step.
//
// Every choice has
//   fn enter_block_max(at: u32, own: f32, parity: u32, team: u32, lane: u32)
//     enters the lane's value of maximum `at`, before the first barrier of a step
//   fn block_max(at: u32, parity: u32, team: u32, lane: u32) -> f32
//     the maximum of the lane's block, after that barrier
//
// gives: begin_block_maxima

// Called before the first step.
fn begin_block_maxima(invocation: u32) {}

// -------- atomic --------

// Largest values over a block of eight lanes, by atomic maxima. There are two sets, so that one can be reset while the
// other is in use.
//
// needs: BLOCK_MAXIMA, INVOCATIONS, STEP_TILES, TILE_QUAD_PAIRS, from_ordered, is_first_of_block, ordered, value_place
// gives: begin_block_maxima, enter_block_max, block_max

// [set][maximum][tile of the step][block]
var<workgroup> block_maxima: array<atomic<u32>, 2u * BLOCK_MAXIMA * STEP_TILES * TILE_QUAD_PAIRS>;

fn begin_block_maxima(invocation: u32) {
    for (var i = invocation; i < 2u * BLOCK_MAXIMA * STEP_TILES * TILE_QUAD_PAIRS; i += INVOCATIONS) {
        atomicStore(&block_maxima[i], 0u);
    }
}

fn block_place(at: u32, parity: u32, team: u32, lane: u32) -> u32 {
    return ((parity * BLOCK_MAXIMA + at) * STEP_TILES + team) * TILE_QUAD_PAIRS + value_place(lane).x / 2u;
}

fn enter_block_max(at: u32, own: f32, parity: u32, team: u32, lane: u32) {
    atomicMax(&block_maxima[block_place(at, parity, team, lane)], ordered(own));
}

fn block_max(at: u32, parity: u32, team: u32, lane: u32) -> f32 {
    if (is_first_of_block(lane)) {
        atomicStore(&block_maxima[block_place(at, 1u - parity, team, lane)], 0u);
    }
    return from_ordered(atomicLoad(&block_maxima[block_place(at, parity, team, lane)]));
}

// -------- subgroup --------

// Largest values over a block of eight lanes, by shuffles: invocations are numbered subgroup by subgroup (see
// attend/numbering.wgsl#subgroup), and subgroups have at least 4 * BLOCK_STRIDE lanes.
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
