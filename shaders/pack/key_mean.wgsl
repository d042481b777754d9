// key_mean: the mean of some keys, as the centre of a sequence. The keys are the tokens of a call, or the first tokens
// of sequences that begin with a step.
//
//   m = (k_1 + … + k_n) · 1 / n
//
// One invocation owns one channel of a KV head of a mean and adds its elements in token order; neighbours own
// neighbouring channels, so rows are read coalesced. Elements that are not finite, or are beyond `largest`, count as 0.
//
// In bounds: invocations beyond the means · `total` = kv_heads · head_dim return; the slots and the rows of the tokens
// were checked against the buffers when they were bound, or when a step's table was made for the layout that they were
// bound to. The loop is bounded by the tokens of the mean; divisors are sizes of a checked shape.
//
// gives: Mean
// binds: 7 centres

// import pack/flat.wgsl
// import pack/call.wgsl
// import rows = pack/rows.wgsl#f32
// import mean = pack/mean.wgsl#of_call

@group(0) @binding(7) var<storage, read_write> centres: array<f32>;

struct Mean {
    // Its first token, relative to the first of the span, and the number of tokens.
    first_token: u32,
    tokens: u32,
    // Slot of the centre.
    slot: u32,
    // 1 / tokens.
    factor: f32,
}

@compute @workgroup_size(64)
fn key_mean(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let index = flat_index(group, groups, invocation);
    if (index / call.total >= mean_count()) {
        return;
    }
    let mean = mean_at(index / call.total);
    let of_centre = index % call.total;
    let kv_head = of_centre / call.head_dim;
    let channel = of_centre % call.head_dim;
    var sum = 0f;
    for (var token = 0u; token < mean.tokens; token++) {
        // Compared as integers, since compilers may assume that no float is NaN.
        let bits = element_bits(row_start(mean.first_token + token, kv_head) + channel);
        if ((bits & 0x7fffffffu) <= bitcast<u32>(call.largest)) {
            sum += bitcast<f32>(bits);
        }
    }
    centres[mean.slot * call.total + of_centre] = sum * mean.factor;
}
