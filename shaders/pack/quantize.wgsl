// quantize: packs rows of a dense tensor into tiles of one shard, with known ranges.
//
//   code = the level of `min + scale · code` nearest to the element, ties to even; f16 rounds to nearest even
//
// One invocation owns one word of a tile and gathers its 32 / BITS elements (parts of 16 or 32 at 3 bits). Neighbours
// own neighbouring words, so tiles are written coalesced, and rows are read in stretches of 16 bytes or more. Fields of
// tokens beyond the span and of channels beyond the head are zero bits. Every element is read once, with about 10
// arithmetic operations per element.
//
// In bounds: invocations beyond the places · kv_heads · tile_words return; pages, the range slot and the rows of the
// tokens read were checked against the buffers when they were bound, or when a step's table was made for the layout
// that they were bound to. Loops have constant bounds; divisors are sizes of a checked shape.
//
// binds: 2 tiles

// import pack/flat.wgsl
// import pack/call.wgsl
// import pack/tile.wgsl#places
// import rows = pack/rows.wgsl#f32
// import field = pack/field.wgsl#codes

@group(0) @binding(2) var<storage, read_write> tiles: array<u32>;

@compute @workgroup_size(64)
fn quantize(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let index = flat_index(group, groups, invocation);
    let word = index % call.tile_words;
    let tile = index / call.tile_words;
    let kv_head = tile % call.kv_heads;
    if (tile / call.kv_heads >= place_count() || !has_place(tile / call.kv_heads)) {
        return;
    }
    let place = place_at(tile / call.kv_heads);
    tiles[(place.page * call.kv_heads + kv_head) * call.tile_words + word] = packed_word(place, kv_head, run_word(word));
}

fn packed_word(place: Place, kv_head: u32, at: vec2<u32>) -> u32 {
    var packed = 0u;
    for (var i = 0u; i < fields_of(at.y); i++) {
        let field = field_of(at, i);
        let token = place.token + field.token;
        if (token < call.tokens && field.channel < call.head_dim) {
            let value = element(row_start(token, kv_head) + field.channel);
            let bits = field_bits(value, place, kv_head, field.token, field.channel);
            packed |= ((bits >> field.low) & field.mask) << field.shift;
        }
    }
    return packed;
}
