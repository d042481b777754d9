// -------- half --------

// Eight weights of a chunk, from scales that f16 holds. Codes less zeros are integers below 512, so that only the product
// with the scale is rounded.

fn octet_halves(chunk: Codes, q: u32, scale: vec2<f32>) -> HalfOctet {
    let field = fields(chunk, q);
    let by = divisors(q);
    let zero = Half4(f16(scale.y));
    let low = (Half4(field.low) - Half4(1024.0)) * Half4(by.low) - zero;
    let high = (Half4(field.high) - Half4(1024.0)) * Half4(by.high) - zero;
    return HalfOctet(f16(scale.x) * low, f16(scale.x) * high);
}

// -------- single --------

// Eight weights of a chunk, from scales in f32.

// import linear/weights.wgsl

fn octet_halves(chunk: Codes, q: u32, scale: vec2<f32>) -> HalfOctet {
    let octet = octet_weights(chunk, q, scale);
    return HalfOctet(Half4(octet.low), Half4(octet.high));
}
