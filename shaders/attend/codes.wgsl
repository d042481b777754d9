// Codes of packed tiles as bytes and as halves. Parts import what they multiply.

// -------- code_halves --------

// Codes of 1, 2, 4 or 8 bits as halves. Combining the bits of 2^10 with an integer below it gives the half of their
// sum. Two such halves are unpacked at once. Eight codes, which are two neighbouring field groups, are the bytes of one
// bit plane and of the next: of one word, or of two at 8 bits.
//
// needs: Eight, Half4
// gives: Half2, CODES, first_word, second_word, pairs_of_bytes, code_halves

alias Half2 = vec2<f16>;

// The origin to subtract so that codes remain, counted from 0.
const CODES: f16 = 1024h;

// The words of a row of keys, or of a column of values, that hold eight codes.
fn first_word(eight: u32, bits: u32) -> u32 {
    return eight * bits / 4u;
}

fn second_word(eight: u32, bits: u32) -> u32 {
    return first_word(eight, bits) + bits / 8u;
}

// The bytes of two words, in pairs of halves: their even bytes, and their odd ones.
fn pairs_of_bytes(low: u32, high: u32) -> vec4<u32> {
    return vec4<u32>(low, low >> 8u, high, high >> 8u) & vec4<u32>(0x00ff00ffu);
}

// Eight codes minus `origin` and 2^10. Fields hold codes with the top bit flipped.
fn code_halves(words: vec2<u32>, eight: u32, bits: u32, origin: f16) -> Eight {
    let plane = eight * 2u * bits % 8u;
    let low = words.x >> plane;
    let high = words.y >> (plane + bits % 8u);
    let fields = pairs_of_bytes(low, high) & vec4<u32>(((1u << bits) - 1u) * 0x00010001u);
    let halves = fields ^ vec4<u32>(0x64006400u | (0x00010001u << (bits - 1u)));
    let a = Half2(unpack2x16float(halves.x)) - origin;
    let b = Half2(unpack2x16float(halves.y)) - origin;
    let c = Half2(unpack2x16float(halves.z)) - origin;
    let d = Half2(unpack2x16float(halves.w)) - origin;
    return Eight(Half4(a.x, b.x, a.y, b.y), Half4(c.x, d.x, c.y, d.y));
}

// -------- four_bits --------

// Codes of 4 bits as halves, for kernels in which all codes have 4 bits. The general attend/codes.wgsl#code_halves
// takes a second register for every word. Combining the bits of 2^10 with an integer below 16 gives the half of their
// sum. Two such halves, four fields apart, are unpacked at once.
//
// needs: Eight, Half4
// gives: Half2, CODES, SIGNED_CODES, code_halves

alias Half2 = vec2<f16>;

// The origin to subtract so that codes 0 .. 15 remain, or the contents of their fields, which are 8 less.
const CODES: f16 = 1024h;
const SIGNED_CODES: f16 = 1032h;

// Eight neighbouring fields.
fn code_halves(fields: u32, origin: f16) -> Eight {
    let pairs = vec4<u32>(fields, fields >> 8u, fields >> 4u, fields >> 12u) & vec4<u32>(0x000f000fu);
    let halves = pairs ^ vec4<u32>(0x64086408u);
    let a = Half2(unpack2x16float(halves.x)) - origin;
    let b = Half2(unpack2x16float(halves.y)) - origin;
    let c = Half2(unpack2x16float(halves.z)) - origin;
    let d = Half2(unpack2x16float(halves.w)) - origin;
    return Eight(Half4(a.x, b.x, a.y, b.y), Half4(c.x, d.x, c.y, d.y));
}

// -------- level_bytes --------

// Levels of a codebook as signed bytes: level = (byte + 1/2) · unit, see `format::codebook`. A negative level's byte is
// the complement of its opposite's. At 2 and 3 bits the levels above 0 are exclusive ors of constants, one for each bit
// of the index, and at 4 bits sums of multiples of the index and of its bits. So four fields are looked up at once.
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
    // 4, 13, 22, 31, 41, 53, 68, 88: nine apart below 41, and 1, 4, 10, 21 more from there on.
    let below = sign * 255u;
    let index = (fields ^ below) & 0x07070707u;
    let upper = (index >> 2u) & 0x01010101u;
    let upper0 = index & upper;
    let upper1 = (index >> 1u) & upper;
    let level = (index + upper1) * 9u + (upper + 0x04040404u) + upper0 * 3u + (upper0 & upper1) * 8u;
    return level ^ below;
}

// -------- level_halves --------

// Codes of a codebook as halves: (byte + 1/2) / 128 of the bytes of attend/codes.wgsl#level_bytes, exactly.
//
// needs: Eight, Half2, Half4, pairs_of_bytes
// gives: level_halves

// import attend/codes.wgsl#level_bytes

// Eight codes of the words and planes that attend/codes.wgsl#code_halves takes.
fn level_halves(words: vec2<u32>, eight: u32, bits: u32) -> Eight {
    let plane = eight * 2u * bits % 8u;
    let low = level_bytes(words.x >> plane, bits);
    let high = level_bytes(words.y >> (plane + bits % 8u), bits);
    // Of a byte b above −128: the half 4 + (2 b + 1) / 256, minus 5.
    let halves = (pairs_of_bytes(low, high) ^ vec4<u32>(0x00800080u)) * 2u + vec4<u32>(0x44014401u);
    let a = Half2(unpack2x16float(halves.x)) - 5h;
    let b = Half2(unpack2x16float(halves.y)) - 5h;
    let c = Half2(unpack2x16float(halves.z)) - 5h;
    let d = Half2(unpack2x16float(halves.w)) - 5h;
    return Eight(Half4(a.x, b.x, a.y, b.y), Half4(c.x, d.x, c.y, d.y));
}
