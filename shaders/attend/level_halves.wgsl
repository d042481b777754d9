// Codes of a codebook as halves: (byte + 1/2) / 128 of the bytes of attend/level_bytes.wgsl, exactly.
//
// needs: Eight, Half2, Half4, pairs_of_bytes
// gives: level_halves

// import attend/level_bytes.wgsl

// Eight codes of the words and planes that attend/code_halves.wgsl takes.
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
