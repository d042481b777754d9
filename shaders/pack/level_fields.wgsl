// Slot `level_fields`: codes of the levels of a codebook, stored signed. The default is for a sketch alone, which has
// no levels.
//
// gives: level_field, level_value

// The field of the level nearest to a value, relative to the norm of its row.
fn level_field(value: f32, norm: f32) -> u32 {
    return 0u;
}

// The level of a field, relative to the norm. Higher bits are ignored.
fn level_value(field: u32) -> f32 {
    return 0f;
}

// -------- levels --------

// Codes of levels, stored signed: `format::Codebook`, bit for bit.
//
// needs: rounded
// gives: level_field, level_value
// set by plans: LEVEL_BITS, LEVELS, LEVELS_LOW, LEVELS_HIGH, BOUNDARIES_LOW, BOUNDARIES_HIGH

// import pack/half.wgsl#conversions

const LEVEL_BITS: u32 = 4u;
// Levels above 0, and the boundaries above 0 between them.
const LEVELS: u32 = 8u;
const LEVELS_LOW: vec4<f32> = vec4<f32>(1f, 2f, 3f, 4f);
const LEVELS_HIGH: vec4<f32> = vec4<f32>(5f, 6f, 7f, 8f);
const BOUNDARIES_LOW: vec4<f32> = vec4<f32>(1.5f, 2.5f, 3.5f, 4.5f);
const BOUNDARIES_HIGH: vec4<f32> = vec4<f32>(5.5f, 6.5f, 7.5f, 0f);

// The field of the nearest level. A boundary belongs to the lower level.
fn level_field(value: f32, norm: f32) -> u32 {
    if (norm == 0f) {
        return LEVELS;
    }
    let negative = !(value > 0f);
    let magnitude = abs(value);
    var index = 0u;
    // unroll
    for (var i = 0u; i < LEVELS - 1u; i++) {
        let boundary = rounded(norm * select(BOUNDARIES_HIGH[i % 4u], BOUNDARIES_LOW[i % 4u], i < 4u));
        index += u32(magnitude > boundary || (magnitude == boundary && negative));
    }
    return select(LEVELS + index, LEVELS - 1u - index, negative) ^ LEVELS;
}

// The level of a field, relative to the norm. Higher bits are ignored.
fn level_value(field: u32) -> f32 {
    // A field is the code minus the middle one, in two's complement. The top bit is the sign, and below 0 the distance
    // counts from -1. Levels below 0 are the negatives of those above.
    let negative = (field >> (LEVEL_BITS - 1u)) & 1u;
    let index = (field ^ (0u - negative)) & ((1u << (LEVEL_BITS - 1u)) - 1u);
    let four = select(LEVELS_HIGH, LEVELS_LOW, index < 4u);
    let two = select(four.zw, four.xy, (index & 2u) == 0u);
    let level = select(two.y, two.x, (index & 1u) == 0u);
    return bitcast<f32>(bitcast<u32>(level) ^ (negative << 31u));
}
