// Values as levels of a codebook: v = norm · level, one norm per token. Four norms per field group, the same for all
// channels.

// import common/levels.wgsl
// import value_codes = common/value_codes.wgsl

@group(0) @binding(6) var<storage, read> value_ranges: array<u32>;

// Levels above 0, ascending.
const VALUE_LEVELS_LOW: vec4<f32> = vec4<f32>(1f, 2f, 3f, 4f);
const VALUE_LEVELS_HIGH: vec4<f32> = vec4<f32>(5f, 6f, 7f, 8f);

var<private> value_norm_base: u32;

fn begin_value_tile(tile_base: u32, channel: u32, k: u32) {
    value_norm_base = tile_base * TILE_TOKENS;
}

fn value_field(words: ValueVector, w: u32, plane: u32, field: u32, k: u32) -> vec4<f32> {
    let base = value_norm_base + field;
    let norms = vec4<f32>(
        unpack2x16float(value_ranges[base]).x,
        unpack2x16float(value_ranges[base + 32u]).x,
        unpack2x16float(value_ranges[base + 64u]).x,
        unpack2x16float(value_ranges[base + 96u]).x,
    );
    return levels_of(value_fields(words, w, plane), VALUE_BITS, VALUE_LEVELS_LOW, VALUE_LEVELS_HIGH) * norms;
}
