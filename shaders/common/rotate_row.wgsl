// A row of HEAD_DIM channels in workgroup memory, rotated in place: `format::Rotation`. Blocks of ORDER channels are
// multiplied with the Walsh-Hadamard matrix over √ORDER.
//
// Who puts a channel in applies `rotation_input` to it; who takes it out of a row rotated back applies `unflipped`. An
// invocation owns pairs of channels; one barrier per butterfly stage. Every invocation of the workgroup must call.

const ROTATION_ORDER: u32 = 16u;
// 1 / √ORDER.
const ROTATION_SCALE: f32 = 0.25f;
// Whether signs are flipped, and the seed of the signs.
const ROTATION_SIGNED: u32 = 0u;
const ROTATION_SEED: u32 = 0u;
// 1 where the row is rotated back: signs are flipped after the butterflies.
const ROTATION_BACK: u32 = 0u;

var<workgroup> rotated: array<f32, HEAD_DIM>;

fn rotation_input(x: f32, channel: u32) -> f32 {
    // Bits of 2^-50: smaller elements count as 0.
    let magnitude = bitcast<u32>(x) & 0x7fffffffu;
    return select(flipped(x, channel, 1u - ROTATION_BACK) * ROTATION_SCALE, 0f, magnitude < 0x26800000u);
}

fn unflipped(x: f32, channel: u32) -> f32 {
    return flipped(x, channel, ROTATION_BACK);
}

fn flipped(x: f32, channel: u32, apply: u32) -> f32 {
    var word = ROTATION_SEED + 0x9e3779b9u * (channel + 1u);
    word = (word ^ (word >> 16u)) * 0x7feb352du;
    word = (word ^ (word >> 15u)) * 0x846ca68bu;
    let flip = (word ^ (word >> 16u)) & ROTATION_SIGNED & apply;
    return bitcast<f32>(bitcast<u32>(x) ^ (flip << 31u));
}

fn rotate_row(invocation: u32) {
    for (var half = 1u; half < ROTATION_ORDER; half *= 2u) {
        workgroupBarrier();
        for (var pair = invocation; pair < HEAD_DIM / 2u; pair += INVOCATIONS) {
            let low = pair / half * (2u * half) + pair % half;
            let a = rotated[low];
            let b = rotated[low + half];
            rotated[low] = a + b;
            rotated[low + half] = a - b;
        }
    }
    workgroupBarrier();
}
