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
