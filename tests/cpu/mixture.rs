//! Contexts in chunks of several precisions (Cocktail), reordered while they are packed.

use kvpack::cache::{ChunkStores, KvCache, Mixture, ModelCache, ModelRecipe, StoreId};
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{ElementType, RowLayout, TokenRange};
use kvpack::policy::chunk_shares;
use kvpack::{AttentionShape, Error};
use pollster::block_on;
use proptest::prelude::*;

use any_backend::mixed::mixed;

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn permuted_is_unpermuted(mixed in mixed()) {
        mixed.check(&Cpu::new(), 1e-10);
    }

    /// The best come first, whatever the similarities, and as many as their share.
    #[test]
    fn shares_are_filled_from_the_best(
        similarities in prop::collection::vec((-9i32..9).prop_map(|x| x as f32 / 8.0), 1..60),
        first in 0.0f64..0.5,
        second in 0.0f64..0.5,
    ) {
        let tiers = chunk_shares(&similarities, &[first, second]).unwrap();
        let count = |tier| tiers.iter().filter(|&&of_chunk| of_chunk == tier).count();
        let below = |share: f64| (share * similarities.len() as f64 + 1e-12) as usize;
        prop_assert_eq!(count(0), below(first));
        prop_assert_eq!(count(0) + count(1), below(first + second));
        for (a, b) in (0..tiers.len()).flat_map(|a| (0..a).map(move |b| (b, a))) {
            // b comes after a: it is better placed only if it is better.
            prop_assert!(tiers[b] >= tiers[a] || similarities[b] > similarities[a]);
            prop_assert!(tiers[a] >= tiers[b] || similarities[a] >= similarities[b]);
        }
    }
}

#[test]
fn shares_that_are_none_are_refused() {
    assert!(matches!(chunk_shares(&[], &[0.5]), Err(Error::Chunks { .. })));
    assert!(matches!(chunk_shares(&[0.1, f32::NAN], &[0.5]), Err(Error::NotANumber { index: 1, .. })));
    for shares in [&[1.5][..], &[-0.1], &[f64::NAN], &[0.7, 0.7]] {
        assert!(matches!(chunk_shares(&[0.1], shares), Err(Error::Budget { .. })), "{shares:?}");
    }
    // Tenths do not sum to 1 in binary.
    assert_eq!(chunk_shares(&[0.5; 10], &[0.1; 10]).unwrap(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
}

fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

fn range(start: usize, end: usize) -> TokenRange {
    TokenRange::new(start, end).unwrap()
}

#[test]
fn chunk_lists_cover_their_context() {
    let stores = |count| vec![StoreId(1); count];
    for (tokens, chunk_tokens, given) in [(100, 32, 2), (100, 32, 4), (31, 32, 1), (100, 8, 12), (1000, 129, 7)] {
        let refused = ChunkStores::new(range(0, tokens), chunk_tokens, stores(given));
        assert!(matches!(refused, Err(Error::Chunks { .. })), "{refused:?}");
    }
    let chunks = ChunkStores::new(range(10, 110), 32, stores(3)).unwrap();
    let refused = block_on(chunks.upload(&Cpu::new(), 2, 109)).map(drop);
    assert!(matches!(refused, Err(Error::PromptSpans { tokens: 109, .. })), "{refused:?}");
    // A store that the recipe does not have, and heads that the cache does not have: nothing is stored.
    let recipe: ModelRecipe = "cocktail".parse().unwrap();
    let mut cache = KvCache::new(Cpu::new(), shape(), 1, recipe.layer(0, &shape())).unwrap();
    let rows = CpuTensor::F32(vec![0.5; 100 * 128]);
    let layout = RowLayout::token_major(100, &shape());
    for (store, kv_heads) in [(3, 2), (2, 1)] {
        let chunks = ChunkStores::new(range(0, 100), 32, vec![StoreId(store); 3]).unwrap();
        let spans = block_on(chunks.upload(&Cpu::new(), kv_heads, 100)).unwrap();
        let refused = block_on(cache.prefill(0, layout, &rows, &rows, &spans.prompt()));
        assert!(matches!(refused, Err(Error::Plan { .. })), "{refused:?}");
        assert_eq!((cache.length(0), cache.memory().in_use_bytes()), (Ok(0), 0));
    }
    // A context shorter than a chunk stays in f16.
    let none = ChunkStores::new(range(0, 31), 32, Vec::new()).unwrap();
    let spans = block_on(none.upload(&Cpu::new(), 2, 100)).unwrap();
    block_on(cache.prefill(0, layout, &rows, &rows, &spans.prompt())).unwrap();
    assert_eq!(cache.memory().f16().tokens, 100);
}

#[test]
fn embeddings_that_cannot_be_compared_are_refused() {
    let recipe: ModelRecipe = "cocktail".parse().unwrap();
    let mixture: &Mixture = recipe.mixture().unwrap();
    let search = |query: &[f32], chunks: &[f32]| {
        let tensor = |rows: &[f32]| CpuTensor::F32(rows.to_vec());
        block_on(mixture.search(&Cpu::new(), &tensor(query), &tensor(chunks)))
    };
    let found = search(&[1.0, 0.0], &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]).unwrap();
    assert_eq!(found, [StoreId(0), StoreId(2), StoreId(1)]);
    assert!(matches!(search(&[1.0, 0.0], &[1.0; 5]), Err(Error::Chunks { .. })));
    assert!(matches!(search(&[1.0], &[]), Err(Error::Chunks { .. })));
    assert!(matches!(search(&[1.0, f32::NAN], &[1.0; 4]), Err(Error::NotANumber { .. })));
    assert!(matches!(search(&[1.0, 0.0], &[1.0, f32::NAN, 0.0, 0.0]), Err(Error::NotANumber { .. })));
}

/// All layers of a model take the chunks of one search, and decoding goes on in f16.
#[test]
fn a_model_takes_chunks() {
    let recipe: ModelRecipe = "cocktail+layers=1:f16".parse().unwrap();
    let layers: Vec<_> = (0..3).map(|layer| (shape(), recipe.layer(layer, &shape()))).collect();
    let mut cache = ModelCache::new(&Cpu::new(), &layers, 1).unwrap();
    let stores = recipe.mixture().unwrap().stores_of(&[0.1, 0.9, 0.7]).unwrap();
    let chunks = ChunkStores::new(range(5, 105), 32, stores).unwrap();
    let spans = block_on(chunks.upload(&Cpu::new(), 2, 120)).unwrap();
    let prompt = spans.prompt();
    block_on(cache.reserve_for_prefill(&prompt)).unwrap();
    cache.begin_prefill(0, 120, &prompt).unwrap();
    let rows = CpuTensor::F32((0..120 * 128).map(|i| (i as f32).sin()).collect());
    let query = CpuTensor::F32(vec![0.5; 256]);
    for layer in 0..3 {
        block_on(cache.store_prompt(layer, RowLayout::token_major(120, &shape()), &rows, &rows, &prompt)).unwrap();
        block_on(cache.attend(layer, &query, ElementType::F32)).unwrap();
    }
    cache.commit().unwrap();
    let tokens = |cache: &ModelCache<Cpu>, layer| -> Vec<usize> {
        cache.memory_of(layer).unwrap().stores().iter().map(|store| store.tokens).collect()
    };
    assert_eq!((tokens(&cache, 0), tokens(&cache, 1)), (vec![120 - 64, 32, 32], vec![120]));
    assert_eq!(cache.length(0), Ok(120));
    // It can be cut behind the chunks, which end at 101, and not through them.
    assert!(matches!(cache.truncate(0, 100), Err(Error::Plan { .. })));
    cache.truncate(0, 105).unwrap();
    assert_eq!((cache.length(0), tokens(&cache, 0)), (Ok(105), vec![105 - 64, 32, 32]));
}
