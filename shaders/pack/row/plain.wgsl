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
