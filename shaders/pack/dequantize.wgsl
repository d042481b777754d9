// dequantize: decodes tiles of one shard into dense f32 rows [kv_heads, tokens, head_dim] of a span.
//
//   element = min + scale · code, rounded after the product and after the sum
//
// or, with ADDS, the sum of the element and the value already in the output.
//
// One invocation owns one element; neighbours own neighbouring channels, so rows are written coalesced. Every
// invocation that owns a field of a word reads that word.
//
// In bounds: invocations beyond `total` = places · kv_heads · 128 · head_dim, and those of tokens beyond the span,
// return; pages, the range slot and the output were checked against the buffers when they were bound. Divisors are
// sizes of a checked shape.
//
// binds: 1 tiles, 2 output
// set by plans: ADDS

// import pack/flat.wgsl
// import pack/call.wgsl
// import pack/tile.wgsl#places
// import field = pack/field.wgsl#codes

const ADDS: u32 = 0u;

@group(0) @binding(1) var<storage, read> tiles: array<u32>;
@group(0) @binding(2) var<storage, read_write> output: array<f32>;

@compute @workgroup_size(64)
fn dequantize(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let index = flat_index(group, groups, invocation);
    if (index >= call.total) {
        return;
    }
    let channel = index % call.head_dim;
    let row = index / call.head_dim;
    let token = row % TILE_TOKENS;
    let kv_head = row / TILE_TOKENS % call.kv_heads;
    let place = call.places[row / TILE_TOKENS / call.kv_heads];
    if (place.token + token >= call.tokens) {
        return;
    }
    let at = place_of(token, channel);
    let tile = (place.page * call.kv_heads + kv_head) * call.tile_words;
    var field = (tiles[tile + at.x] >> at.y) & FIELD_MASK;
    if (BITS == 3u) {
        let top = top_place_of(token, channel);
        field = (field & 3u) | (((tiles[tile + top.x] >> top.y) & 1u) << 2u);
    }
    let value = field_value(field, place, kv_head, token, channel);
    let at_output = (kv_head * call.tokens + place.token + token) * call.head_dim + channel;
    if (ADDS == 1u) {
        output[at_output] = output[at_output] + rounded(value);
    } else {
        output[at_output] = value;
    }
}
