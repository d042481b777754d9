// No codes of levels: a sketch is all there is.

// import common/half.wgsl

fn level_field(value: f32, norm: f32) -> u32 {
    return 0u;
}

fn level_value(field: u32) -> f32 {
    return 0f;
}
