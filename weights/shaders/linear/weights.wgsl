// Weights from codes: scale · (code - zero).

// import linear/octet.wgsl

// Octet q of a chunk. Fields are 1024 + f · code, and divisors 1 / f.
fn octet_weights(chunk: Codes, q: u32, scale: vec2<f32>) -> Octet {
    let field = fields(chunk, q);
    let by = divisors(q);
    let low = (field.low - 1024.0) * by.low - scale.y;
    let high = (field.high - 1024.0) * by.high - scale.y;
    return Octet(scale.x * low, scale.x * high);
}
