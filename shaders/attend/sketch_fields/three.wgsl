// 3-bit fields of keys with sketches at the bottom of their bytes. A vector of three words holds eight field groups,
// the last first: low pairs of bits in two words, top bits in the third.
//
// needs: KeyVector
// gives: KEY_QUADS, key_fields

const KEY_QUADS: u32 = 2u;

fn key_fields(words: KeyVector, quad: u32, f: u32) -> u32 {
    let pairs = select(words[0], words[1], quad == 0u) >> (2u * (3u - f));
    let tops = words[2] >> (7u - quad * 4u - f);
    return (pairs & 0x03030303u) | ((tops & 0x01010101u) << 2u);
}
