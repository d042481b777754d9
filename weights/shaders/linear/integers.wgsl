// Inputs as integers of 16 bits, cut into two bytes. Inputs in f16 and bf16 have at most 11 bits, so that rounding does
// not take the largest to 2^15.

// Inputs lie below 2^MAGNITUDE units.
const MAGNITUDE: u32 = 15u;

// Bytes of eight integers, in the order of the codes of a word.
struct Bytes {
    high: vec2<u32>,
    low: vec2<u32>,
}

struct Sums {
    high: i32,
    low: u32,
}

// The integers lie in the low bits of the words: 0 to 3 in `a`, 4 to 7 in `b`.
fn cut(a: vec4<u32>, b: vec4<u32>) -> Bytes {
    let first = (a.xz & vec2<u32>(0xFFFFu)) | (a.yw << vec2<u32>(16u));
    let second = (b.xz & vec2<u32>(0xFFFFu)) | (b.yw << vec2<u32>(16u));
    return Bytes(
        ((first >> vec2<u32>(8u)) & vec2<u32>(0x00FF00FFu)) | (second & vec2<u32>(0xFF00FF00u)),
        (first & vec2<u32>(0x00FF00FFu)) | ((second << vec2<u32>(8u)) & vec2<u32>(0xFF00FF00u)),
    );
}

fn add_products(sums: ptr<function, Sums>, x: Bytes, a: u32, b: u32) {
    (*sums).high += dot4I8Packed(a, x.high.x) + dot4I8Packed(b, x.high.y);
    (*sums).low += dot4U8Packed(a, x.low.x) + dot4U8Packed(b, x.low.y);
}

// 32 products of at most 15 · 2^15.
fn whole(sums: Sums) -> i32 {
    return sums.high * 256i + i32(sums.low);
}
