//! What things tell of themselves is what they were given.

use kvpack::AttentionShape;
use kvpack::backend::StepKinds;
use kvpack::cache::{Budget, ChunkStores, Growth, KvCache, ModelCache, Recipe, StoreId, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{LayerAttention, Placement, RowLayout, Scoring, TokenRange, TreeMask};
use kvpack::policy::{Policy, Pool, Pooling};
use pollster::block_on;

use any_backend::compressed::Prompt;

fn shape(kv_heads: usize) -> AttentionShape {
    AttentionShape::new(4, kv_heads, 64).unwrap()
}

fn rows(tokens: usize, shape: &AttentionShape) -> CpuTensor {
    CpuTensor::F32((0..tokens * shape.kv_heads() * 64).map(|i| (i % 7) as f32).collect())
}

/// A model of two kinds of layers, with `tokens` tokens in the first sequence and one in the second.
fn filled(tokens: usize) -> ModelCache<Cpu> {
    let layers = [(shape(2), Recipe::f16()), (shape(1), Recipe::f16())];
    let mut cache = ModelCache::new(&Cpu::new(), &layers, 2).unwrap();
    let runs = [TokenRun::chunk(0, tokens), TokenRun::chunk(1, 1)];
    block_on(cache.reserve_for_append(&runs)).unwrap();
    cache.begin_append(&runs).unwrap();
    for (layer, (shape, _)) in layers.iter().enumerate() {
        let rows = rows(tokens + 1, shape);
        block_on(cache.store(layer, RowLayout::token_major(tokens + 1, shape), &rows, &rows)).unwrap();
    }
    cache.commit().unwrap();
    cache
}

#[test]
fn budgets_are_kept_and_told() {
    let budget = Budget::of_bytes(12_345).growing(Growth::Exact);
    let cache = KvCache::new(Cpu::new(), shape(2), 1, Recipe::f16()).unwrap();
    assert_eq!(cache.budget(), Budget::default());
    assert_eq!(cache.with_budget(budget).budget(), budget);
    let cache = ModelCache::new(&Cpu::new(), &[(shape(2), Recipe::f16())], 1).unwrap();
    assert_eq!(cache.budget(), Budget::default());
    assert_eq!(cache.with_budget(budget).budget(), budget);
}

/// Stores of f16 are told together, whatever kinds of layers they are of.
#[test]
fn memory_of_all_layers_is_their_sum() {
    let cache = filled(300);
    let of_layer = |layer: usize| *cache.memory_of(layer).unwrap().f16();
    let (all, one, other) = (*cache.memory().f16(), of_layer(0), of_layer(1));
    assert_eq!((one.pages_in_use, other.pages_in_use), (4, 4), "three pages of 300 tokens, one of a token");
    assert_eq!((one.tokens, other.tokens), (301, 301));
    assert_eq!(one.elements, 2 * other.elements);
    assert_eq!(all.allocated_bytes, one.allocated_bytes + other.allocated_bytes);
    assert_eq!(all.in_use_bytes, one.in_use_bytes + other.in_use_bytes);
    assert_eq!(all.pages, one.pages + other.pages);
    assert_eq!(all.pages_in_use, one.pages_in_use + other.pages_in_use);
    assert_eq!(all.tokens, one.tokens + other.tokens);
    assert_eq!(all.elements, one.elements + other.elements);
}

#[test]
fn what_is_debugged_is_named() {
    let cache = KvCache::new(Cpu::new(), shape(2), 3, Recipe::f16()).unwrap();
    let told = format!("{cache:?}");
    assert!(told.starts_with("KvCache {") && told.contains("sequences: 3"), "{told}");
    let cache = filled(5);
    let told = format!("{cache:?}");
    assert!(told.starts_with("ModelCache {") && told.contains("sequences: 2"), "{told}");
    let prompt = Prompt::new(shape(2), 2, 60, 1);
    let cache = prompt.cache(&Cpu::new(), &Recipe::f16());
    let told = format!("{:?}", prompt.observe(&cache, Policy::h2o(0.5).unwrap()));
    assert!(told.starts_with("ObservedPrompt {") && told.contains("tokens: 60, layers: 2"), "{told}");
}

#[test]
fn sequences_on_their_way_out_name_themselves() {
    let mut cache = filled(5);
    let leaving = cache.begin_swap_out(1).unwrap();
    assert_eq!(leaving.sequence(), 1);
    let told = format!("{leaving:?}");
    assert!(told.starts_with("SwapOut {") && told.contains("sequence: 1"), "{told}");
    while !leaving.has_arrived().unwrap() {
        std::thread::yield_now();
    }
    assert_eq!(block_on(cache.finish_swap_out(leaving)).unwrap().length(), 1);
    assert_eq!((cache.length(0), cache.length(1)), (Ok(5), Ok(0)));
}

#[test]
fn chunks_keep_their_stores() {
    let stores = vec![StoreId(1), StoreId(0), StoreId(1)];
    let chunks = ChunkStores::new(TokenRange::new(0, 100).unwrap(), 32, stores.clone()).unwrap();
    assert_eq!(chunks.stores(), stores);
}

#[test]
fn shares_name_their_rank_and_turn() {
    let placement = Placement::new(3).unwrap().with_turn(4).unwrap();
    assert_eq!((placement.ranks(), placement.turn()), (3, 512));
    for rank in 0..3 {
        let share = placement.share(rank).unwrap();
        assert_eq!((share.rank(), *share.placement()), (rank, placement));
    }
}

#[test]
fn trees_and_pooling_tell_their_sizes() {
    let tree = TreeMask::from_bits(3, 5, &[0; 2]).unwrap();
    assert_eq!((tree.queries(), tree.tokens()), (3, 5));
    let pooling = Pooling::new(Pool::Max, 7).unwrap();
    assert_eq!((pooling.pool(), pooling.width()), (Pool::Max, 7));
}

/// Checks compute with the scale that a scoring tells: it must be the one that was given.
#[test]
fn scoring_is_what_was_given() {
    let scoring = Scoring::of(&shape(2)).with_scale(0.3).unwrap();
    assert_eq!((scoring.scale(), scoring.soft_cap(), scoring.sinks()), (0.3, None, None));
    let scoring = scoring.with_soft_cap(30.0).unwrap().with_sinks(&[1.0, -2.0, 0.0, 4.0]).unwrap();
    let sinks: Option<&[f32]> = Some(&[1.0, -2.0, 0.0, 4.0]);
    assert_eq!((scoring.scale(), scoring.soft_cap(), scoring.sinks()), (0.3, Some(30.0), sinks));
    let scoring = scoring.without_sinks();
    assert_eq!((scoring.scale(), scoring.soft_cap(), scoring.sinks()), (0.3, Some(30.0), None));
}

/// A kernel has a scale and a cap of its own, and is told whether there are windows and sinks: steps of layers that
/// differ in these are prepared apart.
#[test]
fn kinds_of_steps_differ_in_how_layers_attend() {
    let scoring = || Scoring::of(&shape(2));
    let layer = LayerAttention::default;
    let of_scoring = |scoring| layer().with_scoring(scoring);
    let alike = [
        vec![layer(), layer()],
        vec![layer().with_window(40), layer().with_window(99)],
        vec![
            of_scoring(scoring().with_sinks(&[0.5; 4]).unwrap()),
            of_scoring(scoring().with_sinks(&[1.5; 4]).unwrap()),
        ],
        vec![of_scoring(scoring().with_soft_cap(30.0).unwrap()), of_scoring(scoring().with_soft_cap(30.0).unwrap())],
        vec![of_scoring(scoring().with_soft_cap(50.0).unwrap())],
        vec![of_scoring(scoring().with_scale(0.3).unwrap()), of_scoring(scoring().with_scale(0.3).unwrap())],
    ];
    let layers: Vec<_> =
        alike.iter().flatten().map(|of| (shape(2), Recipe::f16().with_attention(of.clone()))).collect();
    let cache = ModelCache::new(&Cpu::new(), &layers, 1).unwrap();
    assert_eq!((&cache).step_kinds().len(), alike.len());
}
