// Rotates the row in workgroup memory for its signs: `format::sketch`. Each round first deals channels out to blocks.
// Order and scale are those of the row's own rotation. An invocation owns every 64th channel, and every invocation of
// the workgroup must call.
//
// needs: HEAD_DIM, INVOCATIONS
// gives: sketch_row
// set by plans: SKETCH_BLOCKS, SKETCH_SEED, SKETCH_ROUNDS

// import common/rotate_row.wgsl

const SKETCH_BLOCKS: u32 = 1u;
const SKETCH_SEED: u32 = 0u;
const SKETCH_ROUNDS: u32 = 1u;
// Channels of an invocation: there are no more than 256 in a row.
const SKETCH_CHANNELS: u32 = 4u;

fn sketch_row(invocation: u32) {
    for (var round = 0u; round < SKETCH_ROUNDS; round++) {
        sketch_round(invocation, SKETCH_SEED + round);
    }
}

fn sketch_round(invocation: u32, seed: u32) {
    workgroupBarrier();
    var channels: array<f32, SKETCH_CHANNELS>;
    // unroll
    for (var i = 0u; i < SKETCH_CHANNELS; i++) {
        channels[i] = rotated[min(invocation + i * INVOCATIONS, HEAD_DIM - 1u)];
    }
    workgroupBarrier();
    // unroll
    for (var i = 0u; i < SKETCH_CHANNELS; i++) {
        let channel = invocation + i * INVOCATIONS;
        if (channel < HEAD_DIM) {
            let place = dealt(channel, SKETCH_BLOCKS);
            rotated[place] = scaled_input(flipped(channels[i], place, seed, 1u));
        }
    }
    rotate_row(invocation);
}
