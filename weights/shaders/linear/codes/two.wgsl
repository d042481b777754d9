// Chunks of 2-bit codes: pair j at the bits 2 · (j mod 8) of both halves of word j / 8.

// import linear/octet.wgsl

@group(0) @binding(0) var<storage, read> codes: array<vec2<u32>>;

alias Codes = vec2<u32>;

fn load_codes(chunk: u32) -> Codes {
    return codes[chunk];
}

fn fields(chunk: Codes, q: u32) -> Octet {
    let word = select(chunk.x, chunk.y, q >= 2u) >> (8u * (q % 2u));
    return Octet(
        halves(word & 0x00030003u, word & 0x000C000Cu),
        halves(word & 0x00300030u, word & 0x00C000C0u),
    );
}

fn divisors(q: u32) -> Octet {
    return Octet(vec4<f32>(1.0, 1.0, 0.25, 0.25), vec4<f32>(0.0625, 0.0625, 0.015625, 0.015625));
}
