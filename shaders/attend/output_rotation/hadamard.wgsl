// Rotates outputs back if values are rotated. This happens before outputs become states, so that the states of segments
// of any rotation merge.
//
// needs: HEAD_DIM, INVOCATIONS, WorkItem, write_state_channel
// gives: put_output, finish_output

// import common/rotate_row.wgsl

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
