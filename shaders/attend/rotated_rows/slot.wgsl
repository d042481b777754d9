// Slot `rotated_rows`: rotates the queries of `prepare_run_query` for rotated keys. By default keys are not.
//
// needs: LANE_HEADS
// gives: rotate_rows

// All heads of an invocation, of which it has the channels of `field`; called by all invocations.
fn rotate_rows(rows: ptr<function, array<vec4<f32>, LANE_HEADS>>, invocation: u32, field: u32) {}
