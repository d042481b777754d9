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
