// Arguments of the kernels that merge evicted tokens into kept ones.
//
// gives: call, row_start
// binds: 0 call

struct MergeCall {
    // Index of the first element of the rows within their binding.
    first_element: u32,
    token_stride: u32,
    head_stride: u32,
    tokens: u32,
    kv_heads: u32,
    // Kept and evicted tokens of each head.
    kept: u32,
    evicted: u32,
}

@group(0) @binding(0) var<storage, read> call: MergeCall;

// import rows = pack/rows/f32.wgsl

// Index of the first element of a row. Tokens that do not exist are clamped.
fn row_start(token: u32, kv_head: u32) -> u32 {
    return call.first_element + min(token, call.tokens - 1u) * call.token_stride + kv_head * call.head_stride;
}
