// Codes of 4 bits as halves, for kernels in which all codes have 4 bits. The general attend/code_halves.wgsl takes a
// second register for every word. Combining the bits of 2^10 with an integer below 16 gives the half of their sum. Two
// such halves, four fields apart, are unpacked at once.
//
// needs: Eight, Half4
// gives: Half2, CODES, SIGNED_CODES, code_halves

alias Half2 = vec2<f16>;

// The origin to subtract so that codes 0 .. 15 remain, or the contents of their fields, which are 8 less.
const CODES: f16 = 1024h;
const SIGNED_CODES: f16 = 1032h;

// Eight neighbouring fields.
fn code_halves(fields: u32, origin: f16) -> Eight {
    let pairs = vec4<u32>(fields, fields >> 8u, fields >> 4u, fields >> 12u) & vec4<u32>(0x000f000fu);
    let halves = pairs ^ vec4<u32>(0x64086408u);
    let a = Half2(unpack2x16float(halves.x)) - origin;
    let b = Half2(unpack2x16float(halves.y)) - origin;
    let c = Half2(unpack2x16float(halves.z)) - origin;
    let d = Half2(unpack2x16float(halves.w)) - origin;
    return Eight(Half4(a.x, b.x, a.y, b.y), Half4(c.x, d.x, c.y, d.y));
}
