// Per-channel ranges of the span: v = s u + m with u = c + 2^(bits-1), applied once to every output.
//
// needs: HEAD_DIM, INVOCATIONS, KV_HEADS
// gives: read_output_ranges, begin_value_ranges, ranged_output
// binds: 6 value_span_ranges
// set by plans: VALUE_MIDDLE

// Scale and minimum: [range slot][KV head][channel].
@group(0) @binding(6) var<storage, read> value_span_ranges: array<vec2<f32>>;

const VALUE_MIDDLE: f32 = 8f;

// Ranges of the outputs, by channel. They are read at the start of an item, so that nothing waits for them at its end.
var<workgroup> output_ranges: array<vec2<f32>, HEAD_DIM>;

const OWN_CHANNELS: u32 = (HEAD_DIM + INVOCATIONS - 1u) / INVOCATIONS;

var<private> own_ranges: array<vec2<f32>, OWN_CHANNELS>;

fn read_output_ranges(range_slot: u32, kv_head: u32, invocation: u32) {
    let slot = min(range_slot, arrayLength(&value_span_ranges) / (KV_HEADS * HEAD_DIM) - 1u);
    // unroll
    for (var i = 0u; i < OWN_CHANNELS; i++) {
        let channel = min(i * INVOCATIONS + invocation, HEAD_DIM - 1u);
        own_ranges[i] = value_span_ranges[(slot * KV_HEADS + kv_head) * HEAD_DIM + channel];
    }
}

fn begin_value_ranges(invocation: u32) {
    // unroll
    for (var i = 0u; i < OWN_CHANNELS; i++) {
        if (i * INVOCATIONS + invocation < HEAD_DIM) {
            output_ranges[i * INVOCATIONS + invocation] = own_ranges[i];
        }
    }
}

fn ranged_output(mean: f32, head: u32, total: f32, channel: u32) -> f32 {
    let range = output_ranges[channel];
    return range.x * (mean + VALUE_MIDDLE) + range.y;
}
