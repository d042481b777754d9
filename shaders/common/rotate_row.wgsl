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

// import common/rotation.wgsl

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
