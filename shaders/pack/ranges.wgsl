// Slot `ranges`: the ranges of affine codes.
//
// Every choice has
//   fn stored_range(place: Place, kv_head: u32, token: u32, channel: u32) -> vec2<f32>
//     scale and minimum of an element; the token counts from the first of the page

// -------- of_span --------

// One range per channel of the span: [slot][kv_head][head_dim] of (scale, minimum).
//
// needs: Place, call
// gives: stored_range
// binds: 3 ranges

@group(0) @binding(3) var<storage, read> ranges: array<vec2<f32>>;

fn stored_range(place: Place, kv_head: u32, token: u32, channel: u32) -> vec2<f32> {
    return ranges[(place.range_slot * call.kv_heads + kv_head) * call.head_dim + channel];
}

// -------- of_tile --------

// Tile ranges, one word each.
//
// needs: Place, call, range_of_word
// gives: stored_range
// binds: 3 ranges

// import pack/tile.wgsl#grouping

@group(0) @binding(3) var<storage, read> ranges: array<u32>;

fn stored_range(place: Place, kv_head: u32, token: u32, channel: u32) -> vec2<f32> {
    let tile = place.page * call.kv_heads + kv_head;
    return range_of_word(ranges[tile * call.ranges_per_tile + range_index(token, channel)]);
}
