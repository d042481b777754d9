// Slot `output_rotation`: outputs on their way into states, rotated back where values are stored rotated. By default
// they are stored as they are.
//
// needs: WorkItem, write_state_channel
// gives: put_output, finish_output

fn put_output(item: WorkItem, y: u32, head: u32, channel: u32, output: f32) {
    write_state_channel(item, y, head, channel, output);
}

// Called by all invocations when the outputs of a head are put.
fn finish_output(item: WorkItem, y: u32, head: u32, invocation: u32) {}
