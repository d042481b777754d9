// One range per channel of the span: [slot][kv_head][head_dim] of (scale, minimum).
//
// needs: Place, call
// gives: stored_range
// binds: 3 ranges

@group(0) @binding(3) var<storage, read> ranges: array<vec2<f32>>;

fn stored_range(place: Place, kv_head: u32, token: u32, channel: u32) -> vec2<f32> {
    return ranges[(place.range_slot * call.kv_heads + kv_head) * call.head_dim + channel];
}
