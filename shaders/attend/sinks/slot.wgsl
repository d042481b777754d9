// Slot `sinks`: a logit without a value for every query head. By default there is none.
//
// needs: Joined
// gives: add_sink

fn add_sink(joined: Joined, query_head: u32) -> Joined {
    return joined;
}
