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
