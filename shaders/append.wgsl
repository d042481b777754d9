// append: single tokens into open f16 pages of one shard.
//
// One invocation owns one word of one token: two channels of a key, one channel of a value. A value's word holds
// another token too, which the invocation reads and keeps; the plan puts tokens that share words into dispatches of
// their own. Tokens are read and keys are written coalesced, values in words 16 bytes apart.
//
// In bounds: invocations beyond `total` = places · kv_heads · words of a token return; pages, slots and the rows of
// the tokens read were checked against the buffers when they were bound. Divisors are sizes of a checked shape.

// import common/flat.wgsl
// import common/call.wgsl
// import common/tile.wgsl
// import common/half.wgsl
// import rows = common/rows_f32.wgsl

@group(0) @binding(2) var<storage, read_write> tiles: array<u32>;

@compute @workgroup_size(64)
fn append(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let index = flat_index(group, groups, invocation);
    if (index >= call.total) {
        return;
    }
    let words = call.head_dim / (1u + KEYS);
    let channel = index % words * (1u + KEYS);
    let kv_head = index / words % call.kv_heads;
    let place = call.places[index / words / call.kv_heads];
    let start = row_start(place.token, kv_head) + channel;
    let at = place_of(place.slot, channel);
    let word = (place.page * call.kv_heads + kv_head) * call.tile_words + at.x;
    if (KEYS == 1u) {
        tiles[word] = half_bits(element(start)) | (half_bits(element(start + 1u)) << 16u);
    } else {
        tiles[word] = (tiles[word] & ~(FIELD_MASK << at.y)) | (half_bits(element(start)) << at.y);
    }
}
