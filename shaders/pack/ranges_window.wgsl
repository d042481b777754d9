// ranges_window: one range per channel over a single page, for each of several pages that are spans of their own.
//
//   scale and minimum as in ranges_span
//
// One invocation owns one channel of one page and reads its tokens; neighbours own neighbouring channels, so rows are
// read coalesced. Every element is read once.
//
// In bounds: invocations beyond the places · kv_heads · head_dim return; slots and pages were checked against the
// buffers when the step's table was made for the layout that they were bound to. A page has at most 128 tokens;
// divisors are sizes of a checked shape.
//
// gives: BITS
// binds: 2 ranges
// set by plans: BITS

// import pack/flat.wgsl
// import pack/call.wgsl
// import rows = pack/rows.wgsl#f32
// import pack/code_range.wgsl
// import pack/half.wgsl#conversions

const BITS: u32 = 4u;

// [slot][kv_head][head_dim] of (scale, minimum).
@group(0) @binding(2) var<storage, read_write> ranges: array<vec2<f32>>;

@compute @workgroup_size(64)
fn ranges_window(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let index = flat_index(group, groups, invocation);
    let channels = call.kv_heads * call.head_dim;
    if (index / channels >= place_count() || !has_place(index / channels)) {
        return;
    }
    let place = place_at(index / channels);
    let channel = index % channels;
    let kv_head = channel / call.head_dim;
    var low = element(row_start(place.token, kv_head) + channel % call.head_dim);
    var high = low;
    for (var token = 1u; token < min(TILE_TOKENS, call.tokens - place.token); token++) {
        let value = element(row_start(place.token + token, kv_head) + channel % call.head_dim);
        low = min(low, value);
        high = max(high, value);
    }
    ranges[place.range_slot * channels + channel] = code_range(low, high);
}
