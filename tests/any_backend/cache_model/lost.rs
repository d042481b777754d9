//! A device that is lost while a cache holds tokens.

use kvpack::Error;
use kvpack::backend::Backend;
use kvpack::cache::{KvCache, PromptSpan};
use kvpack::plan::{ElementType, RowLayout, TokenRange};
use pollster::block_on;

use super::{SEQUENCES, rows};
use crate::random_rows::Random;

/// Loses the device of a cache. Every call that needs it says so, and the tables stay as they were.
pub fn lose<B: Backend>(cache: &mut KvCache<B>, random: &mut Random, lose: impl FnOnce(&B)) {
    let shape = *cache.shape();
    let (_, row) = rows(cache.backend(), random, shape.kv_heads() * shape.head_dim(), false);
    let layout = RowLayout::token_major(1, &shape);
    let held = (0..SEQUENCES).find(|&sequence| cache.tokens(sequence).unwrap() > 0);
    let (_, query) = rows(cache.backend(), random, shape.query_heads() * shape.head_dim(), false);
    let lengths = |cache: &KvCache<B>| -> Vec<_> {
        (0..SEQUENCES).map(|sequence| (cache.length(sequence), cache.tokens(sequence))).collect()
    };
    let (before, memory) = (lengths(cache), cache.memory());
    lose(cache.backend());

    let lost = |what: &str, error: Option<Error>| {
        assert!(matches!(error, Some(Error::DeviceLost { .. })), "{what}: {error:?}");
    };
    let span = [PromptSpan::packed(TokenRange::new(0, 1).unwrap())];
    lost("prefill", block_on(cache.prefill(0, layout, &row, &row, &span)).err());
    lost("append", block_on(cache.append_to(&[1], layout, &row, &row)).err());
    lost("extend", block_on(cache.extend(2, layout, &row, &row)).err());
    lost("non_finite", block_on(cache.non_finite()).err());
    if let Some(sequence) = held {
        lost("attend", block_on(cache.attend_to(&[sequence], &query, ElementType::F32)).err());
        lost("swap_out", block_on(cache.swap_out(sequence)).err());
        lost("dequantize", cache.dequantize(sequence).err());
    }
    assert_eq!(lengths(cache), before);
    let in_use = |memory: &kvpack::cache::CacheMemory| memory.in_use_bytes();
    assert_eq!(in_use(&cache.memory()), in_use(&memory));
    // What needs no device goes on.
    (0..SEQUENCES).for_each(|sequence| cache.clear(sequence).unwrap());
}
