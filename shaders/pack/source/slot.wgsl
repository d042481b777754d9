// Slot `source`: the location of the pages to copy.
//
// Every choice has
//   fn source_word(index: u32) -> u32
