// ranges_tile: the tile ranges of one shard, for groups that lie within a tile.
//
//   scale = (max - min) · shrink / (2^BITS - 1),  min = min · shrink,  both rounded to half precision
//   or about 0: scale = max |x| · shrink / (2^(BITS-1) - 1), rounded,  min = -2^(BITS-1) scale
//
// One invocation owns one range and reads its group. Neighbours own neighbouring channels of the same tokens, or
// neighbouring tokens. Groups without a token get zero. Every element is read once.
//
// In bounds: invocations beyond the places · kv_heads · ranges_per_tile return; pages and the rows of the tokens read
// were checked against the buffers when they were bound, or when a step's table was made for the layout that they were
// bound to. A group has at most max(128, head_dim) elements; divisors are sizes of a checked shape and format.
//
// gives: BITS
// binds: 2 ranges
// set by plans: BITS

// import pack/flat.wgsl
// import pack/call.wgsl
// import rows = pack/rows.wgsl#f32
// import pack/half.wgsl#conversions
// import pack/tile.wgsl#grouping
// import pack/code_range.wgsl

const BITS: u32 = 4u;

@group(0) @binding(2) var<storage, read_write> ranges: array<u32>;

@compute @workgroup_size(64)
fn ranges_tile(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let index = flat_index(group, groups, invocation);
    let range = index % call.ranges_per_tile;
    let tile = index / call.ranges_per_tile;
    let kv_head = tile % call.kv_heads;
    if (tile / call.kv_heads >= place_count() || !has_place(tile / call.kv_heads)) {
        return;
    }
    let place = place_at(tile / call.kv_heads);
    ranges[(place.page * call.kv_heads + kv_head) * call.ranges_per_tile + range] = tile_range(place, kv_head, range);
}

fn tile_range(place: Place, kv_head: u32, range: u32) -> u32 {
    // First element of the group, and the step to the next.
    var token = range % TILE_TOKENS;
    var channel = range / TILE_TOKENS * call.group;
    if (GROUPING == 1u) {
        token = range / call.head_dim * call.group;
        channel = range % call.head_dim;
    }
    if (place.token + token >= call.tokens) {
        return 0u;
    }
    let tokens_only = GROUPING == 1u;
    let count = select(call.group, min(call.group, call.tokens - place.token - token), tokens_only);
    var low = element(row_start(place.token + token, kv_head) + channel);
    var high = low;
    for (var i = 1u; i < count; i++) {
        let at = row_start(place.token + token + select(0u, i, tokens_only), kv_head);
        let value = element(at + channel + select(i, 0u, tokens_only));
        low = min(low, value);
        high = max(high, value);
    }
    return range_word(low, high);
}
