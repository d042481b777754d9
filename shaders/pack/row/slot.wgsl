// Slot `row`: a row on its way from a dense tensor into a tile, in workgroup memory.
//
// Every choice has
//   fn put_channel(channel: u32, x: f32)
//     puts a channel in, as it was given
//   fn finish_row(invocation: u32)
//     called by all invocations when all are in
//   fn channel_value(channel: u32) -> f32
//     a channel as it is to be stored
