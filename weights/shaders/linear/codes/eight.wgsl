// Chunks of 8-bit codes: pair j at the bits 8 · (j mod 2) of both halves of word j / 2.

// import linear/octet.wgsl

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;

struct Codes {
    first: vec4<u32>,
    second: vec4<u32>,
}

fn load_codes(chunk: u32) -> Codes {
    return Codes(codes[2u * chunk], codes[2u * chunk + 1u]);
}

fn fields(chunk: Codes, q: u32) -> Octet {
    let half_chunk = select(chunk.first, chunk.second, q >= 2u);
    let words = select(half_chunk.xy, half_chunk.zw, q % 2u == 1u);
    return Octet(
        halves(words.x & 0x00FF00FFu, (words.x >> 8u) & 0x00FF00FFu),
        halves(words.y & 0x00FF00FFu, (words.y >> 8u) & 0x00FF00FFu),
    );
}

fn divisors(q: u32) -> Octet {
    return Octet(vec4<f32>(1.0), vec4<f32>(1.0));
}
