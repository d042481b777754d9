// Tile ranges, one word each.
//
// needs: Place, call, range_of_word
// gives: stored_range
// binds: 3 ranges

// import pack/grouping.wgsl

@group(0) @binding(3) var<storage, read> ranges: array<u32>;

fn stored_range(place: Place, kv_head: u32, token: u32, channel: u32) -> vec2<f32> {
    let tile = place.page * call.kv_heads + kv_head;
    return range_of_word(ranges[tile * call.ranges_per_tile + range_index(token, channel)]);
}
