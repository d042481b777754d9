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
