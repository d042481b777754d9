// Levels of a codebook: `format::Codebook`. Levels above 0 are constants, ascending; the others are their negatives.
//
// gives: levels_of

// The levels of four stored fields of `bits` bits, relative to the norm of their row. `low` holds the four levels above
// 0 that are nearest to it, and `high` the next four, if there are that many.
fn levels_of(fields: vec4<u32>, bits: u32, low: vec4<f32>, high: vec4<f32>) -> vec4<f32> {
    // A field is the code minus the middle one, in two's complement. The top bit is the sign, and below 0 the distance
    // counts from -1.
    let negative = (fields >> vec4<u32>(bits - 1u)) & vec4<u32>(1u);
    let index = (fields ^ (vec4<u32>(0u) - negative)) & vec4<u32>((1u << (bits - 1u)) - 1u);
    let odd = (index & vec4<u32>(1u)) != vec4<u32>(0u);
    var level = select(vec4<f32>(low.x), vec4<f32>(low.y), odd);
    if (bits > 2u) {
        let upper = (index & vec4<u32>(2u)) != vec4<u32>(0u);
        level = select(level, select(vec4<f32>(low.z), vec4<f32>(low.w), odd), upper);
        if (bits > 3u) {
            let near = select(vec4<f32>(high.x), vec4<f32>(high.y), odd);
            let far = select(vec4<f32>(high.z), vec4<f32>(high.w), odd);
            level = select(level, select(near, far, upper), (index & vec4<u32>(4u)) != vec4<u32>(0u));
        }
    }
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(level) ^ (negative << vec4<u32>(31u)));
}
