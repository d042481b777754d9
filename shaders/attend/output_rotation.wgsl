// Slot `output_rotation`: rotates outputs back before they become states, if values are rotated. The default leaves
// them unchanged.
//
// needs: WorkItem, write_state_channel
// gives: put_output, finish_output

fn put_output(item: WorkItem, y: u32, head: u32, channel: u32, output: f32) {
    write_state_channel(item, y, head, channel, output);
}

// Called by all invocations once the outputs of a head are written.
fn finish_output(item: WorkItem, y: u32, head: u32, invocation: u32) {}

// -------- hadamard --------

// Rotates outputs back if values are rotated. This happens before outputs become states, so that the states of segments
// of any rotation merge.
//
// needs: HEAD_DIM, INVOCATIONS, WorkItem, write_state_channel
// gives: put_output, finish_output

// import common/rotation.wgsl#rotate_row

fn put_output(item: WorkItem, y: u32, head: u32, channel: u32, output: f32) {
    rotated[input_place(channel)] = rotation_input(output, input_place(channel));
}

fn finish_output(item: WorkItem, y: u32, head: u32, invocation: u32) {
    rotate_row(invocation);
    for (var channel = invocation; channel < HEAD_DIM; channel += INVOCATIONS) {
        let place = output_place(channel);
        write_state_channel(item, y, head, channel, unflipped(rotated[place], place));
    }
}
