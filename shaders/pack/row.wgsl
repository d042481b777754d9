// Slot `row`: a row on its way from a dense tensor into a tile, in workgroup memory.
//
// Every choice has
//   fn put_channel(channel: u32, x: f32)
//     puts a channel in, as it was given
//   fn finish_row(invocation: u32)
//     called by all invocations when all are in
//   fn channel_value(channel: u32) -> f32
//     a channel as it is to be stored

// -------- plain --------

// A row in workgroup memory that is stored without rotation.
//
// needs: HEAD_DIM
// gives: put_channel, channel_value, finish_row

var<workgroup> row: array<f32, HEAD_DIM>;

fn put_channel(channel: u32, x: f32) {
    row[channel] = x;
}

fn channel_value(channel: u32) -> f32 {
    return row[channel];
}

fn finish_row(invocation: u32) {
    workgroupBarrier();
}

// -------- rotated --------

// A row in workgroup memory that is stored rotated.
//
// needs: rounded
// gives: put_channel, channel_value, finish_row

// import common/rotation.wgsl#rotate_row

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
