// In the shard that is written.
//
// needs: target_words
// gives: source_word

fn source_word(index: u32) -> u32 {
    return target_words[index];
}
