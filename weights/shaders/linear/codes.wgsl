// -------- eight --------

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

// -------- four --------

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

// -------- three --------

// Chunks of 3-bit codes: pair j below 15 at the bits 3 · (j mod 5) of both halves of word j / 5. Bit i of the codes of
// pair 15 is bit 15 of the halves of word i.

// import linear/octet.wgsl

@group(0) @binding(0) var<storage, read> codes: array<u32>;

alias Codes = vec3<u32>;

fn load_codes(chunk: u32) -> Codes {
    return vec3<u32>(codes[3u * chunk], codes[3u * chunk + 1u], codes[3u * chunk + 2u]);
}

// The pairs 0, 1 and 2 of a word lie within a mantissa, 3 and 4 do after a shift by 9.
fn fields(chunk: Codes, q: u32) -> Octet {
    let next = chunk >> vec3<u32>(9u);
    switch q {
        case 0u: {
            return Octet(
                halves(chunk.x & 0x00070007u, chunk.x & 0x00380038u),
                halves(chunk.x & 0x01C001C0u, next.x & 0x00070007u),
            );
        }
        case 1u: {
            return Octet(
                halves(next.x & 0x00380038u, chunk.y & 0x00070007u),
                halves(chunk.y & 0x00380038u, chunk.y & 0x01C001C0u),
            );
        }
        case 2u: {
            return Octet(
                halves(next.y & 0x00070007u, next.y & 0x00380038u),
                halves(chunk.z & 0x00070007u, chunk.z & 0x00380038u),
            );
        }
        default: {
            let last = ((chunk.x >> 15u) & 0x00010001u) | ((chunk.y >> 14u) & 0x00020002u) |
                ((chunk.z >> 13u) & 0x00040004u);
            return Octet(
                halves(chunk.z & 0x01C001C0u, next.z & 0x00070007u),
                halves(next.z & 0x00380038u, last),
            );
        }
    }
}

fn divisors(q: u32) -> Octet {
    let one_eighth = vec4<f32>(1.0, 1.0, 0.125, 0.125);
    switch q {
        case 0u: {
            return Octet(one_eighth, vec4<f32>(0.015625, 0.015625, 1.0, 1.0));
        }
        case 1u: {
            return Octet(vec4<f32>(0.125, 0.125, 1.0, 1.0), vec4<f32>(0.125, 0.125, 0.015625, 0.015625));
        }
        case 2u: {
            return Octet(one_eighth, one_eighth);
        }
        default: {
            return Octet(vec4<f32>(0.015625, 0.015625, 1.0, 1.0), vec4<f32>(0.125, 0.125, 1.0, 1.0));
        }
    }
}

// -------- three_by_lane --------

// The same chunks of 3-bit codes for kernels in which lanes take different octets: an octet is put together without a
// branch, from the end of one word and the beginning of the next.

// import linear/octet.wgsl

@group(0) @binding(0) var<storage, read> codes: array<u32>;

alias Codes = vec3<u32>;

fn load_codes(chunk: u32) -> Codes {
    return vec3<u32>(codes[3u * chunk], codes[3u * chunk + 1u], codes[3u * chunk + 2u]);
}

// Each half of `octet` has the codes of four pairs in a row.
fn fields(chunk: Codes, q: u32) -> Octet {
    let last = ((chunk.x >> 15u) & 0x00010001u) | ((chunk.y >> 14u) & 0x00020002u) | ((chunk.z >> 13u) & 0x00040004u);
    // Octet 0 lies in the first word. Of the others, 3 · q bits of each half lie at the end of a word.
    let first = select(select(chunk.z, chunk.y, q == 2u), chunk.x, q < 2u);
    let second = select(select(last, chunk.z, q == 2u), chunk.y, q < 2u);
    let bits = select(3u * q, 12u, q == 0u);
    let ended = ((1u << bits) - 1u) * 0x00010001u;
    let low = (first >> select(15u - 3u * q, 0u, q == 0u)) & ended;
    let high = (second << bits) & (0x0FFF0FFFu - ended);
    let octet = low | high;
    return Octet(
        halves(octet & 0x00070007u, octet & 0x00380038u),
        halves(octet & 0x01C001C0u, (octet >> 9u) & 0x00070007u),
    );
}

fn divisors(q: u32) -> Octet {
    return Octet(vec4<f32>(1.0, 1.0, 0.125, 0.125), vec4<f32>(0.015625, 0.015625, 1.0, 1.0));
}

// -------- two --------

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
