// Levels of a codebook as signed bytes: level = (byte + 1/2) · unit, see `format::codebook`. A negative level's byte is
// the complement of its opposite's. The steps of the levels above 0 are exclusive ors of constants, one for each bit of
// the index (at 4 bits also for two pairs of bits), so that four fields are looked up at once.
//
// gives: level_bytes

// The bytes of the four fields in the lowest `bits` bits of the bytes of `fields`. Higher bits are ignored.
fn level_bytes(fields: u32, bits: u32) -> u32 {
    // The top bit is the sign, and below 0 the index counts from -1.
    let sign = (fields >> (bits - 1u)) & 0x01010101u;
    let bit0 = fields & 0x01010101u;
    if (bits == 1u) {
        return sign * 255u;
    }
    if (bits == 2u) {
        // 18, 61.
        return 0x12121212u ^ (bit0 * 47u) ^ (sign * (255u ^ 47u));
    }
    let bit1 = (fields >> 1u) & 0x01010101u;
    if (bits == 3u) {
        // 12, 39, 69, 110.
        return 0x0c0c0c0cu ^ (bit0 * 43u) ^ (bit1 * 73u) ^ (sign * (255u ^ 43u ^ 73u));
    }
    // 4, 13, 22, 31, 41, 53, 68, 88.
    let bit2 = (fields >> 2u) & 0x01010101u;
    let pair0 = (bit0 ^ sign) & (bit2 ^ sign);
    let pair1 = (bit1 ^ sign) & (bit2 ^ sign);
    return 0x04040404u ^ (bit0 * 9u) ^ (bit1 * 18u) ^ (bit2 * 45u) ^ (sign * (255u ^ 9u ^ 18u ^ 45u)) ^ (pair0 * 21u)
        ^ (pair1 * 127u);
}
