// Slot `rotated_rows`: rotates the queries of `prepare_run_query` for rotated keys. By default keys are not.
//
// needs: LANE_HEADS
// gives: rotate_rows

// All heads of an invocation, of which it has the channels of `field`; called by all invocations.
fn rotate_rows(rows: ptr<function, array<vec4<f32>, LANE_HEADS>>, invocation: u32, field: u32) {}

// -------- hadamard --------

// Rotates the queries of all heads of a workgroup together, so that they share the barriers. The products stay the same.
//
// The order of the butterflies is that of common/rotation.wgsl#rotate_row. Invocations exchange their vectors of four
// channels.
//
// needs: INVOCATIONS, LANE_HEADS
// gives: rotate_rows

// import common/rotation.wgsl#rotation

var<workgroup> turning: array<vec4<f32>, LANE_HEADS * INVOCATIONS>;

fn turned_input(q: vec4<f32>, channel: u32) -> vec4<f32> {
    return vec4<f32>(rotation_input(q.x, channel), rotation_input(q.y, channel + 1u), rotation_input(q.z, channel + 2u),
        rotation_input(q.w, channel + 3u));
}

fn rotate_rows(rows: ptr<function, array<vec4<f32>, LANE_HEADS>>, invocation: u32, field: u32) {
    // unroll
    for (var i = 0u; i < LANE_HEADS; i++) {
        var v = turned_input((*rows)[i], field * 4u);
        v = vec4<f32>(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w);
        if (ROTATION_ORDER > 2u) {
            v = vec4<f32>(v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w);
        }
        (*rows)[i] = v;
    }
    for (var apart = 1u; apart * 4u < ROTATION_ORDER; apart *= 2u) {
        // unroll
        for (var i = 0u; i < LANE_HEADS; i++) {
            turning[i * INVOCATIONS + invocation] = (*rows)[i];
        }
        workgroupBarrier();
        let is_low = (field & apart) == 0u;
        // unroll
        for (var i = 0u; i < LANE_HEADS; i++) {
            let other = turning[i * INVOCATIONS + (invocation ^ apart)];
            (*rows)[i] = select(other - (*rows)[i], (*rows)[i] + other, is_low);
        }
        workgroupBarrier();
    }
}
