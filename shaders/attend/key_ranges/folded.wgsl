// Per-channel ranges are folded into the prepared query: scale and bias are those of the query head.
//
// gives: ranged_score

fn ranged_score(sum: f32, constants: vec4<f32>, i: u32) -> f32 {
    return sum * constants.x + constants.y;
}
