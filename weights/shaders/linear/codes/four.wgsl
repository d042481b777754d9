// Chunks of 4-bit codes: pair j at the bits 4 · (j mod 4) of both halves of word j / 4.

// import linear/octet.wgsl

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;

alias Codes = vec4<u32>;

fn load_codes(chunk: u32) -> Codes {
    return codes[chunk];
}

fn fields(chunk: Codes, q: u32) -> Octet {
    let word = chunk[q];
    let next = word >> 8u;
    return Octet(
        halves(word & 0x000F000Fu, word & 0x00F000F0u),
        halves(next & 0x000F000Fu, next & 0x00F000F0u),
    );
}

fn divisors(q: u32) -> Octet {
    let by = vec4<f32>(1.0, 1.0, 0.0625, 0.0625);
    return Octet(by, by);
}
