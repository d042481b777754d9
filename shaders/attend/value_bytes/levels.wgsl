// Signed bytes of a field group of values, codes of a codebook.
//
// gives: ValueVector, VALUE_PLANES, VALUE_VECTORS, VALUE_QUADS, VALUE_BYTE, value_bytes, value_place
// set by plans: VALUE_BITS

// import attend/level_bytes.wgsl

alias ValueVector = vec4<u32>;

const VALUE_BITS: u32 = 4u;
const VALUE_PLANES: u32 = 8u / VALUE_BITS;
// Vectors of a channel's column in a tile, and sets of four field groups in a vector: one for each bit plane.
const VALUE_VECTORS: u32 = VALUE_BITS;
const VALUE_QUADS: u32 = VALUE_PLANES;
const VALUE_BYTE: f32 = 1f;

fn value_bytes(words: ValueVector, quad: u32, f: u32) -> u32 {
    return level_bytes(words[f] >> (quad * VALUE_BITS), VALUE_BITS);
}

// Quad of the tile and place in it of field group `group`: word group / VALUE_PLANES of the column, bit plane
// group % VALUE_PLANES.
fn value_place(group: u32) -> vec2<u32> {
    let word = group / VALUE_PLANES;
    return vec2<u32>(word / 4u * VALUE_PLANES + group % VALUE_PLANES, word % 4u);
}
