// Slot `source`: the location of the pages to copy.
//
// Every choice has
//   fn source_word(index: u32) -> u32

// -------- other --------

// In another shard.
//
// gives: source_word
// binds: 1 source_words

@group(0) @binding(1) var<storage, read> source_words: array<u32>;

fn source_word(index: u32) -> u32 {
    return source_words[index];
}

// -------- same --------

// In the shard that is written.
//
// needs: target_words
// gives: source_word

fn source_word(index: u32) -> u32 {
    return target_words[index];
}
