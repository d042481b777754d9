//! The cache on the CPU backend against the naive model.

use kvpack::cache::{Appended, StoreId};
use kvpack::cpu::Cpu;
use kvpack::format::KeyOrValue;
use kvpack::{AttentionShape, Error, KvCache, Recipe, SegmentFormat};
use proptest::prelude::*;

use any_backend::cache_model::decode_loop::{Filled, formats, reuse_pages};
use any_backend::cache_model::recipes::recipes;
use any_backend::cache_model::{Operation, cases, check, operations};
use any_backend::rounding;

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn the_cache_agrees_with_the_model(
        operations in operations(),
        recipe in prop::sample::select(recipes()),
        (query_heads, kv_heads, head_dim) in prop::sample::select(vec![(2, 2, 64), (3, 1, 64), (4, 2, 80)]),
        seed in any::<u64>(),
    ) {
        let shape = AttentionShape::new(query_heads, kv_heads, head_dim).unwrap();
        // Three pages of the f16 store to a shard.
        let cpu = Cpu::new().with_max_shard_bytes((3 * 128 * 2 * kv_heads * head_dim) as u64);
        check(cpu, shape, &recipe, &operations, seed);
    }
}

/// Two full windows in a row, at every recipe: the second joins the first where ranges belong to tiles.
#[test]
fn windows_are_packed_when_they_are_full() {
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    for recipe in recipes() {
        let prefill = Operation::Prefill { sequence: 0, spans: vec![(10, 0), (128, 1)], half: false };
        let append = |tokens| Operation::Append { tokens, sequences: 0b11, half: false };
        check(Cpu::new(), shape, &recipe, &[prefill, append(127), append(1), append(127), append(2)], 1);
    }
}

/// Packed windows that joined are one span: what lies in its middle is not forgotten, what lies at its beginning is.
#[test]
fn joined_windows_are_forgotten_from_their_beginning() {
    let shape = AttentionShape::new(2, 2, 64).unwrap();
    for recipe in recipes() {
        let append = |tokens| Operation::Extend { sequence: 1, tokens, half: false };
        let forget = |first, last| Operation::Forget { sequence: 1, hundredths: (first, last) };
        check(Cpu::new(), shape, &recipe, &[append(100), append(300), forget(40, 97), append(128), forget(0, 60)], 1);
    }
}

/// 4096 appended tokens are the 4096 tokens of a prefill, word for word of codes and ranges.
#[test]
fn a_decode_loop_stores_what_a_prefill_stores() {
    for format in formats() {
        let filled = Filled::new(Cpu::new, format, 4096);
        filled.compare_decoded();
        for sequence in 0..2 {
            let pages = [&filled.prefilled, &filled.appended].map(|cache| Filled::pages(cache, sequence));
            for (prefilled, appended) in pages[0].iter().zip(&pages[1]) {
                for (which, head) in
                    [(KeyOrValue::Key, 0), (KeyOrValue::Key, 1), (KeyOrValue::Value, 0), (KeyOrValue::Value, 1)]
                {
                    let prefilled = filled.prefilled.stores()[1].tile_words(which, *prefilled, head).unwrap();
                    let appended = filled.appended.stores()[1].tile_words(which, *appended, head).unwrap();
                    assert!(prefilled == appended, "{format}: {which}, head {head}");
                }
            }
        }
    }
}

#[test]
fn ranges_over_tokens_cannot_be_packed_token_by_token() {
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    let recipe = Recipe::pack_all(SegmentFormat::calibquant(kvpack::Bits::Two));
    let recipe = recipe.with_appended(Appended::AtOnce(StoreId::PACKED));
    assert!(matches!(KvCache::new(Cpu::new(), shape, 1, recipe), Err(Error::Format { .. })));
}

#[test]
fn what_an_earlier_sequence_left_does_not_count() {
    reuse_pages(Cpu::new);
}

#[test]
fn outputs_are_rounded_to_even() {
    rounding::outputs_are_rounded_to_even(Cpu::new());
}
