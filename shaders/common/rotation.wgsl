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
