// Elements that may be NaN, infinite or too large: these count as 0, and the first token with one is flagged. They are
// compared as integers, since compilers may assume that no float is NaN.
//
// needs: call
// gives: flagged_element
// binds: 5 flag

@group(0) @binding(5) var<storage, read_write> flag: atomic<u32>;

fn flagged_element(bits: u32, token: u32) -> f32 {
    if ((bits & 0x7fffffffu) > bitcast<u32>(call.largest)) {
        atomicMin(&flag, token);
        return 0f;
    }
    return bitcast<f32>(bits);
}
