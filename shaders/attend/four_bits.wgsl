// Codes of 4 bits as floats.
//
// gives: signed_codes

// The signed codes in the low four bits of each byte: c = code - 8. Bits of 2^23 and a whole number are the float of both.
fn signed_codes(fields: u32) -> vec4<f32> {
    let codes = (fields & 0x0f0f0f0fu) ^ 0x08080808u;
    let bytes = vec4<u32>(codes, codes >> 8u, codes >> 16u, codes >> 24u) & vec4<u32>(15u);
    return bitcast<vec4<f32>>(bytes | vec4<u32>(0x4b000000u)) - vec4<f32>(8388616f);
}
