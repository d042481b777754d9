// norms_tile: the norms of the tokens in the tiles of one shard.
//
//   norm = √Σ x², rounded to half precision
//
// One invocation owns one token of one KV head and reads its row. Slots without a token get zero. Every element is read
// once.
//
// In bounds: invocations beyond `total` = places · kv_heads · 128 return; pages and the rows of the tokens read were
// checked against the buffers when they were bound. Loops are bounded by head_dim, a multiple of 4; divisors are sizes
// of a checked shape.
//
// binds: 2 ranges

// import pack/flat.wgsl
// import pack/call.wgsl
// import rows = pack/rows.wgsl#f32
// import pack/half.wgsl#conversions
// import pack/norm.wgsl#norm

@group(0) @binding(2) var<storage, read_write> ranges: array<u32>;

@compute @workgroup_size(64)
fn norms_tile(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let index = flat_index(group, groups, invocation);
    if (index >= call.total) {
        return;
    }
    let token = index % TILE_TOKENS;
    let tile = index / TILE_TOKENS;
    let kv_head = tile % call.kv_heads;
    let place = call.places[tile / call.kv_heads];
    var norm = 0u;
    if (place.token + token < call.tokens) {
        let start = row_start(place.token + token, kv_head);
        var sum = 0f;
        for (var channel = start; channel < start + call.head_dim; channel += 4u) {
            let x = vec4<f32>(element(channel), element(channel + 1u), element(channel + 2u), element(channel + 3u));
            sum = rounded(sum + sum_of_four(x));
        }
        norm = norm_bits(sum);
    }
    ranges[(place.page * call.kv_heads + kv_head) * call.ranges_per_tile + token] = norm;
}
