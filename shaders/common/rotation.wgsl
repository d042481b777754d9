// Hadamard rotations: their order and signs, of a row in workgroup memory or in registers, and once more for a sketch.

// -------- rotation --------

// `format::Rotation` of a row of channels: its numbers, and what becomes of a channel before and after the butterflies.
//
// gives: ROTATION_ORDER, dealt, input_place, output_place, rotation_input, scaled_input, unflipped, flipped
// set by plans: ROTATION_ORDER, ROTATION_SCALE, ROTATION_SIGNED, ROTATION_SEED, ROTATION_BACK, ROTATION_BLOCKS

const ROTATION_ORDER: u32 = 16u;
// 1 / √ORDER.
const ROTATION_SCALE: f32 = 0.25f;
// Whether signs are flipped, and the seed of the signs.
const ROTATION_SIGNED: u32 = 0u;
const ROTATION_SEED: u32 = 0u;
// 1 for the inverse rotation: signs are flipped after the butterflies.
const ROTATION_BACK: u32 = 0u;

// Number of blocks that channels are dealt out to.
const ROTATION_BLOCKS: u32 = 1u;

fn dealt(channel: u32, blocks: u32) -> u32 {
    return channel % blocks * ROTATION_ORDER + channel / blocks;
}

fn input_place(channel: u32) -> u32 {
    return select(dealt(channel, ROTATION_BLOCKS), channel, ROTATION_BACK == 1u);
}

fn output_place(channel: u32) -> u32 {
    return select(channel, dealt(channel, ROTATION_BLOCKS), ROTATION_BACK == 1u);
}

fn rotation_input(x: f32, place: u32) -> f32 {
    return scaled_input(flipped(x, place, ROTATION_SEED, ROTATION_SIGNED & (1u - ROTATION_BACK)));
}

fn scaled_input(x: f32) -> f32 {
    // Bits of 2^-50: smaller elements count as 0.
    return select(x * ROTATION_SCALE, 0f, (bitcast<u32>(x) & 0x7fffffffu) < 0x26800000u);
}

fn unflipped(x: f32, place: u32) -> f32 {
    return flipped(x, place, ROTATION_SEED, ROTATION_SIGNED & ROTATION_BACK);
}

fn flipped(x: f32, place: u32, seed: u32, apply: u32) -> f32 {
    var word = seed + 0x9e3779b9u * (place + 1u);
    word = (word ^ (word >> 16u)) * 0x7feb352du;
    word = (word ^ (word >> 15u)) * 0x846ca68bu;
    let flip = (word ^ (word >> 16u)) & apply;
    return bitcast<f32>(bitcast<u32>(x) ^ (flip << 31u));
}

// -------- rotate_row --------

// Rotates a row of HEAD_DIM channels in workgroup memory, in place: `format::Rotation`. Blocks of ORDER channels are
// multiplied with the Walsh-Hadamard matrix over √ORDER.
//
// Channels may first be dealt out to the blocks in turns: channel c then lies at `dealt(c)`. Code that writes a channel
// does so at `input_place` and applies `rotation_input`. Code that reads a channel does so at `output_place` and
// applies `unflipped`. An invocation owns pairs of channels. There is one barrier per butterfly stage, and every
// invocation of the workgroup must call.
//
// needs: HEAD_DIM, INVOCATIONS
// gives: rotated, rotate_row

// import common/rotation.wgsl#rotation

var<workgroup> rotated: array<f32, HEAD_DIM>;

fn rotate_row(invocation: u32) {
    for (var stage = 0u; (1u << stage) < ROTATION_ORDER; stage++) {
        let half = 1u << stage;
        workgroupBarrier();
        for (var pair = invocation; pair < HEAD_DIM / 2u; pair += INVOCATIONS) {
            // pair / half · 2 half + pair % half. Compilers do not know the divisor and would divide.
            let low = ((pair >> stage) << (stage + 1u)) + (pair & (half - 1u));
            let a = rotated[low];
            let b = rotated[low + half];
            rotated[low] = a + b;
            rotated[low + half] = a - b;
        }
    }
    workgroupBarrier();
}

// -------- sketch_row --------

// Rotates the row in workgroup memory for its signs: `format::sketch`. Each round first deals channels out to blocks.
// Order and scale are those of the row's own rotation. An invocation owns every 64th channel, and every invocation of
// the workgroup must call.
//
// needs: HEAD_DIM, INVOCATIONS
// gives: sketch_row
// set by plans: SKETCH_BLOCKS, SKETCH_SEED, SKETCH_ROUNDS

// import common/rotation.wgsl#rotate_row

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

// -------- rotate_vectors --------

// Rotates a row in the registers of a lane.
//
// The order of the butterflies is that of `rotate_row`, so that the bits are the same.
//
// needs: HEAD_DIM
// gives: ROW_VECTORS, rotate_vectors

// import common/rotation.wgsl#rotation

// Vectors of four channels of a row, and pairs of them.
const ROW_VECTORS: u32 = HEAD_DIM / 4u;
const ROW_PAIRS: u32 = HEAD_DIM / 8u;
// Stages of butterflies between vectors, for the largest order.
const VECTOR_STAGES: u32 = 6u;

fn rotate_vectors(row: ptr<function, array<vec4<f32>, ROW_VECTORS>>) {
    // unroll
    for (var i = 0u; i < ROW_VECTORS; i++) {
        var v = (*row)[i];
        v = vec4<f32>(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w);
        if (ROTATION_ORDER > 2u) {
            v = vec4<f32>(v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w);
        }
        (*row)[i] = v;
    }
    // unroll
    for (var stage = 0u; stage < VECTOR_STAGES; stage++) {
        if (ROTATION_ORDER >= (8u << stage)) {
            // unroll
            for (var pair = 0u; pair < ROW_PAIRS; pair++) {
                const low = ((pair >> stage) << (stage + 1u)) + (pair & ((1u << stage) - 1u));
                const high = min(low + (1u << stage), ROW_VECTORS - 1u);
                let a = (*row)[low];
                let b = (*row)[high];
                (*row)[low] = a + b;
                (*row)[high] = a - b;
            }
        }
    }
}
