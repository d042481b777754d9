// Slot `sinks`: a logit without a value for every query head. By default there is none.
//
// needs: Joined
// gives: add_sink

fn add_sink(joined: Joined, query_head: u32) -> Joined {
    return joined;
}

// -------- logits --------

// A sink is one more state: its output is 0 and its log-sum-exp the logit. It is joined once for every query, where its
// output is written.
//
// In bounds: the index of the logit is clamped to the logits.
//
// needs: Joined
// gives: add_sink
// binds: 11 sinks

// [query head]; a head without a sink has the lowest f32.
@group(0) @binding(11) var<storage, read> sinks: array<f32>;

fn add_sink(joined: Joined, query_head: u32) -> Joined {
    let sink = sinks[min(query_head, arrayLength(&sinks) - 1u)];
    let largest = max(joined.largest, sink);
    let own = exp(joined.largest - largest);
    return Joined(joined.sum * own, joined.weight_sum * own + exp(sink - largest), largest);
}
