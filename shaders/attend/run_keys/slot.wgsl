// Slot `run_keys`: eight neighbouring channels of a key, from memory to halves.
//
// Every choice has
//   const KEY_UNIT: f32
//     the factor of products with these halves
//   alias KeyWord
//     what is read of them
//   fn run_key_pages() -> u32
//   fn load_key(tile_base: u32, token: u32, eight: u32) -> KeyWord
//     channels 8 · eight onwards of a token of the tile
//   fn key_halves(word: KeyWord, eight: u32) -> Eight
