//! Recipes, rooms and prompts of a cache: small examples, and what is refused.

use kvpack::backend::Device;
use kvpack::cache::{Appended, PromptSpan, StoreId};
use kvpack::cpu::{Cpu, CpuIndices, CpuTensor};
use kvpack::plan::{RowLayout, Rows, TokenRange};
use kvpack::{AttentionShape, Bits, Error, KvCache, Recipe, SegmentFormat};
use pollster::block_on;

fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

/// Keys or values of `tokens` tokens.
fn rows(tokens: usize) -> CpuTensor {
    CpuTensor::F32(vec![0.25; tokens * shape().kv_heads() * shape().head_dim()])
}

#[test]
fn a_recipe_has_a_number_of_stores() {
    let mut recipe = Recipe::pack_all(SegmentFormat::saw_int4());
    let mut stores = recipe.stores().len();
    let refused = loop {
        match recipe.clone().with_store(SegmentFormat::F16) {
            Ok((more, id)) => {
                assert_eq!((more.stores().len(), id.index()), (stores + 1, stores));
                (recipe, stores) = (more, stores + 1);
            }
            Err(error) => break error,
        }
    };
    let Error::Limit { needed, allowed, .. } = refused else { panic!("{refused}") };
    assert_eq!((needed, allowed), (stores as u64 + 1, stores as u64));
    assert!(KvCache::new(Cpu::new(), shape(), 1, recipe).is_ok());
}

/// The rule for appended tokens that a recipe has makes the same recipe of it; one that names no packed store is refused.
#[test]
fn appended_tokens_go_to_a_packed_store() {
    for recipe in
        [Recipe::calibquant(Bits::Two).with_window(128), Recipe::pack_all(SegmentFormat::saw_int4()), Recipe::f16()]
    {
        assert_eq!(recipe.clone().with_appended(recipe.appended()), recipe);
    }
    let recipe = Recipe::pack_all(SegmentFormat::saw_int4());
    for to in [StoreId::F16, StoreId(7)] {
        for appended in [Appended::AtOnce(to), Appended::Tiles { to, newer: 0 }] {
            let cache = KvCache::new(Cpu::new(), shape(), 1, recipe.clone().with_appended(appended));
            assert!(matches!(cache.err(), Some(Error::Plan { .. })), "{appended:?}");
        }
    }
}

/// A sink is room in f16 for tokens that are packed at once; without one they need none.
#[test]
fn only_a_sink_needs_room_in_f16() {
    for (sink, pages) in [(0, 0), (40, 1)] {
        let recipe = Recipe::pack_all(SegmentFormat::saw_int4()).with_sink(sink);
        let mut cache = KvCache::new(Cpu::new(), shape(), 1, recipe).unwrap();
        block_on(cache.extend(0, RowLayout::token_major(300, &shape()), &rows(300), &rows(300))).unwrap();
        let of = cache.pages_of(0).unwrap();
        assert_eq!(of[0].own, pages, "a sink of {sink}");
        assert_eq!(of[1].own, 3, "a sink of {sink}");
    }
}

/// What nothing lies in is freed, and its bytes are told.
#[test]
fn trimming_tells_what_it_frees() {
    let mut cache = KvCache::new(Cpu::new(), shape(), 1, Recipe::f16()).unwrap();
    block_on(cache.reserve(StoreId::F16, 1000)).unwrap();
    let allocated = cache.memory().allocated_bytes();
    assert!(allocated > 0);
    assert_eq!((cache.trim(), cache.memory().allocated_bytes()), (allocated, 0));
}

/// Spans follow each other, and what a gather names lies in the prompt.
#[test]
fn spans_of_a_prompt_lie_in_it() {
    let prefill = |spans: &[PromptSpan<'_, CpuIndices>]| {
        let mut cache = KvCache::new(Cpu::new(), shape(), 1, Recipe::pack_all(SegmentFormat::saw_int4())).unwrap();
        block_on(cache.prefill(0, RowLayout::token_major(30, &shape()), &rows(30), &rows(30), spans))
    };
    let run = |start, end| PromptSpan::packed(TokenRange::new(start, end).unwrap());
    assert_eq!(prefill(&[run(0, 10), run(10, 30)]).map(drop), Ok(()));
    for spans in [[run(0, 10), run(20, 30)], [run(0, 20), run(10, 30)], [run(0, 10), run(10, 31)]] {
        let refused = prefill(&spans);
        assert!(matches!(refused, Err(Error::PromptSpans { .. })), "{refused:?}");
    }
    let gathered = |below| block_on(Cpu::new().upload_indices(&[0, 1, 0, 1], shape().kv_heads(), below)).unwrap();
    for (below, fits) in [(30, true), (31, false)] {
        let indices = gathered(below);
        let stored = prefill(&[PromptSpan { tokens: Rows::Gather(&indices), ..run(0, 1) }]);
        assert_eq!(stored.is_ok(), fits, "{below}: {stored:?}");
    }
}

/// The pages of a cache, counted by its memory.
#[test]
fn memory_is_counted_in_bits() {
    let mut cache = KvCache::new(Cpu::new(), shape(), 1, Recipe::f16()).unwrap();
    assert_eq!(cache.memory().bits_per_element(), 0.0);
    let tokens = 256;
    block_on(cache.extend(0, RowLayout::token_major(tokens, &shape()), &rows(tokens), &rows(tokens))).unwrap();
    assert_eq!(cache.memory().bits_per_element(), 16.0);
    assert_eq!(cache.memory().in_use_bytes(), (tokens * 2 * 64 * 2 * 2) as u64);
}
