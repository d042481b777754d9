// Signed bytes of a field group of values of 3 bits. A vector of three words holds eight field groups: low pairs of
// bits in two words, top bits in the third.
//
// gives: ValueVector, VALUE_VECTORS, VALUE_QUADS, VALUE_BYTE, value_bytes, value_place

// import three_bytes = attend/three_bytes/top.wgsl

alias ValueVector = array<u32, 3>;

// Vectors of a channel's column in a tile, and sets of four field groups in a vector.
const VALUE_VECTORS: u32 = 4u;
const VALUE_QUADS: u32 = 2u;
const VALUE_BYTE: f32 = THREE_BYTE;

fn value_bytes(words: ValueVector, quad: u32, f: u32) -> u32 {
    let pairs = select(words[0], words[1], quad == 1u) >> (2u * f);
    let tops = words[2] >> (quad * 4u + f);
    return three_bytes((pairs & 0x03030303u) | ((tops & 0x01010101u) << 2u));
}

// Quad of the tile and place in it of field group `group`.
fn value_place(group: u32) -> vec2<u32> {
    return vec2<u32>(group / 4u, group % 4u);
}
