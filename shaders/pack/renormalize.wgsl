// renormalize: divides the norms of the tokens in the tiles of one shard by the norms of their levels.
//
//   norm / √Σ level², rounded to half precision
//
// Runs after the codes were computed with the norm. One invocation owns one token of one KV head and reads its fields
// one after the other. Neighbours read neighbouring words of keys, and the same words of values. Slots without a token
// keep zero. Every code is read once, with about 12 arithmetic operations each.
//
// In bounds: invocations beyond `total` = places · kv_heads · 128 return; pages were checked against the buffers when
// they were bound. Loops are bounded by head_dim, a multiple of 4; divisors are sizes of a checked shape.
//
// binds: 1 tiles, 2 ranges

// import pack/flat.wgsl
// import pack/call.wgsl
// import pack/tile.wgsl#places
// import pack/half.wgsl#conversions
// import level_fields = pack/level_fields.wgsl#levels
// import pack/norm.wgsl#norm

@group(0) @binding(1) var<storage, read> tiles: array<u32>;
@group(0) @binding(2) var<storage, read_write> ranges: array<u32>;

@compute @workgroup_size(64)
fn renormalize(
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
    let page_head = call.places[tile / call.kv_heads].page * call.kv_heads + tile % call.kv_heads;
    var sum = 0f;
    for (var channel = 0u; channel < call.head_dim; channel += 4u) {
        let start = page_head * call.tile_words;
        sum = rounded(sum + sum_of_four(vec4<f32>(
            level_value(stored_field(start, token, channel)),
            level_value(stored_field(start, token, channel + 1u)),
            level_value(stored_field(start, token, channel + 2u)),
            level_value(stored_field(start, token, channel + 3u)),
        )));
    }
    let at = page_head * call.ranges_per_tile + token;
    ranges[at] = renormalized_bits(half_value(ranges[at]), sum);
}

// The field of an element of the tile that starts at this word.
fn stored_field(start: u32, token: u32, channel: u32) -> u32 {
    let at = place_of(token, channel);
    let field = tiles[start + at.x] >> at.y;
    if (BITS == 3u) {
        let top = top_place_of(token, channel);
        return (field & 3u) | (((tiles[start + top.x] >> top.y) & 1u) << 2u);
    }
    return field & FIELD_MASK;
}
