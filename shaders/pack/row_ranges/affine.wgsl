// Ranges of a single row: one for all its channels, or one for each group of channels. They are stored with the tile,
// and the rounded values are kept for the codes. An invocation owns four channels, then one range.
//
// needs: HEAD_DIM, Place, call, channel_value, range_of_word, range_word
// gives: stored_range, store_row_ranges
// binds: 3 ranges

// import pack/grouping.wgsl

@group(0) @binding(3) var<storage, read_write> ranges: array<u32>;

// Smallest and largest of four channels; later scale and minimum of each group.
var<workgroup> row_extremes: array<vec2<f32>, HEAD_DIM / 4u>;
var<workgroup> row_ranges: array<vec2<f32>, HEAD_DIM / 4u>;

fn stored_range(place: Place, kv_head: u32, token: u32, channel: u32) -> vec2<f32> {
    return row_ranges[channel / call.group];
}

fn joined(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
    return vec2<f32>(min(a.x, b.x), max(a.y, b.y));
}

fn store_row_ranges(place: Place, kv_head: u32, invocation: u32) {
    if (invocation < HEAD_DIM / 4u) {
        let x = vec4<f32>(
            channel_value(invocation * 4u),
            channel_value(invocation * 4u + 1u),
            channel_value(invocation * 4u + 2u),
            channel_value(invocation * 4u + 3u),
        );
        row_extremes[invocation] = vec2<f32>(min(min(x.x, x.y), min(x.z, x.w)), max(max(x.x, x.y), max(x.z, x.w)));
    }
    workgroupBarrier();
    if (invocation < HEAD_DIM / call.group) {
        let count = call.group / 4u;
        let first = invocation * count;
        var extremes = row_extremes[first];
        // Four loads wait for memory together.
        var i = 0u;
        for (; i + 4u <= count; i += 4u) {
            let near = joined(row_extremes[first + i], row_extremes[first + i + 1u]);
            let far = joined(row_extremes[first + i + 2u], row_extremes[first + i + 3u]);
            extremes = joined(extremes, joined(near, far));
        }
        for (; i < count; i++) {
            extremes = joined(extremes, row_extremes[first + i]);
        }
        let word = range_word(extremes.x, extremes.y);
        let tile = place.page * call.kv_heads + kv_head;
        ranges[tile * call.ranges_per_tile + range_index(place.slot, invocation * call.group)] = word;
        row_ranges[invocation] = range_of_word(word);
    }
    workgroupBarrier();
}
