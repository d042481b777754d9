// A row in workgroup memory that is stored rotated.
//
// needs: rounded
// gives: put_channel, channel_value, finish_row

// import common/rotate_row.wgsl

fn put_channel(channel: u32, x: f32) {
    let place = input_place(channel);
    rotated[place] = rounded(rotation_input(x, place));
}

fn channel_value(channel: u32) -> f32 {
    return rotated[channel];
}

fn finish_row(invocation: u32) {
    rotate_row(invocation);
}
