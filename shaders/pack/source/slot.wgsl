// Slot `source`: where the pages to copy lie.
//
// Every choice has
//   fn source_word(index: u32) -> u32
