// In another shard.
//
// gives: source_word
// binds: 1 source_words

@group(0) @binding(1) var<storage, read> source_words: array<u32>;

fn source_word(index: u32) -> u32 {
    return source_words[index];
}
