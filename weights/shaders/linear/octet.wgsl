// Eight neighbouring numbers of a chunk.

struct Octet {
    low: vec4<f32>,
    high: vec4<f32>,
}

// Four codes in two words of 10 bits in each half, as 1024 + their fields.
fn halves(a: u32, b: u32) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(a | 0x64006400u), unpack2x16float(b | 0x64006400u));
}
