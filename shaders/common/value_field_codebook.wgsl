// Values as levels of a codebook: v = norm · level, one norm per token. Four norms per field group, the same for all
// channels.

// import common/levels.wgsl

@group(0) @binding(6) var<storage, read> value_ranges: array<u32>;

const VALUE_BITS: u32 = 4u;
const VALUE_PLANES: u32 = 8u / VALUE_BITS;
const VALUE_WORD_FIELDS: u32 = 4u;
const VALUE_VECTORS: u32 = VALUE_BITS;
// Levels above 0, ascending.
const VALUE_LEVELS_LOW: vec4<f32> = vec4<f32>(1f, 2f, 3f, 4f);
const VALUE_LEVELS_HIGH: vec4<f32> = vec4<f32>(5f, 6f, 7f, 8f);

var<private> value_norm_base: u32;

fn begin_value_tile(tile_base: u32, channel: u32, k: u32) {
    value_norm_base = tile_base * TILE_TOKENS;
}

fn value_field(words: vec4<u32>, w: u32, plane: u32, field: u32, k: u32) -> vec4<f32> {
    let base = value_norm_base + field;
    let norms = vec4<f32>(
        unpack2x16float(value_ranges[base]).x,
        unpack2x16float(value_ranges[base + 32u]).x,
        unpack2x16float(value_ranges[base + 64u]).x,
        unpack2x16float(value_ranges[base + 96u]).x,
    );
    let fields = unpack4xU8((words[w] >> (plane * VALUE_BITS)) & (0x01010101u * ((1u << VALUE_BITS) - 1u)));
    return levels_of(fields, VALUE_BITS, VALUE_LEVELS_LOW, VALUE_LEVELS_HIGH) * norms;
}
