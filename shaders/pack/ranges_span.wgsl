// ranges_span: one range per channel over all tokens of a span, in three dispatches.
//
//   scale = (max - min) · shrink / (2^BITS - 1),  min = min · shrink
//   or about 0: scale = max |x| · shrink / (2^(BITS-1) - 1),  min = -2^(BITS-1) scale
//
// ranges_span_clear zeroes the slot. ranges_span_extremes records the largest element and the largest negated element
// of every channel, by atomic maxima of their ordered bits (0 lies below every float's). ranges_span turns them into
// ranges in place. One invocation of the second owns CHUNK tokens of one channel; neighbours own neighbouring channels,
// so rows are read coalesced. Every element is read once, with two atomics per CHUNK elements.
//
// In bounds: invocations beyond `total` return; the slot and the rows of the tokens read were checked against the
// buffers when they were bound. Divisors are sizes of a checked shape.
//
// gives: BITS
// binds: 2 ranges
// set by plans: BITS, CHUNK

// import pack/flat.wgsl
// import pack/call.wgsl
// import common/ordered.wgsl#ordered
// import rows = pack/rows.wgsl#f32
// import pack/code_range.wgsl
// import pack/half.wgsl#conversions

const BITS: u32 = 4u;
const CHUNK: u32 = 64u;
const SIGN_BIT: u32 = 0x80000000u;

// [slot][kv_head][head_dim] of (scale, minimum), or of (largest negated, largest) until ranges_span runs.
@group(0) @binding(2) var<storage, read_write> ranges: array<atomic<u32>>;

fn range_start(channel: u32) -> u32 {
    return 2u * (call.range_slot * call.kv_heads * call.head_dim + channel);
}

@compute @workgroup_size(64)
fn ranges_span_clear(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let channel = flat_index(group, groups, invocation);
    if (channel < call.kv_heads * call.head_dim) {
        atomicStore(&ranges[range_start(channel)], 0u);
        atomicStore(&ranges[range_start(channel) + 1u], 0u);
    }
}

@compute @workgroup_size(64)
fn ranges_span_extremes(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let index = flat_index(group, groups, invocation);
    if (index >= call.total) {
        return;
    }
    let channels = call.kv_heads * call.head_dim;
    let channel = index % channels;
    let first = index / channels * CHUNK;
    let end = min(first + CHUNK, call.tokens);
    var low = 0u;
    var high = 0u;
    for (var token = first; token < end; token++) {
        let bits = element_bits(row_start(token, channel / call.head_dim) + channel % call.head_dim);
        low = max(low, ordered_bits(bits ^ SIGN_BIT));
        high = max(high, ordered_bits(bits));
    }
    atomicMax(&ranges[range_start(channel)], low);
    atomicMax(&ranges[range_start(channel) + 1u], high);
}

@compute @workgroup_size(64)
fn ranges_span(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let channel = flat_index(group, groups, invocation);
    if (channel < call.kv_heads * call.head_dim) {
        let start = range_start(channel);
        let low = -from_ordered(atomicLoad(&ranges[start]));
        let high = from_ordered(atomicLoad(&ranges[start + 1u]));
        let range = code_range(low, high);
        atomicStore(&ranges[start], bitcast<u32>(range.x));
        atomicStore(&ranges[start + 1u], bitcast<u32>(range.y));
    }
}

fn ordered_bits(bits: u32) -> u32 {
    return select(bits | SIGN_BIT, ~bits, bits >= SIGN_BIT);
}
