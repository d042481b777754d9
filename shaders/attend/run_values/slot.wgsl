// Slot `run_values`: the values of eight tokens of a channel, from memory to halves.
//
// Every choice has
//   alias ValueWord
//     what is read of them
//   fn run_value_pages() -> u32
//   fn load_value(tile_base: u32, vector: u32, channel: u32) -> ValueWord
//     tokens 2 vector + i / 4 + 32 (i % 4) of a tile, i below 8
//   fn value_halves(word: ValueWord, vector: u32) -> Eight
//   fn run_output(range_slot: u32, kv_head: u32, channel: u32, mean: vec4<f32>) -> vec4<f32>
//     outputs of four channels, of the weighted mean of the halves
