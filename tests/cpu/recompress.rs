//! Sequences that grow, and are compressed again to the budget of their length.

use std::cell::Cell;
use std::rc::Rc;

use kvpack::backend::{Forward, Forwarding, SpanWrite};
use kvpack::cache::{ChunkStores, ModelCache, Recipe, SpanPositions, StoreId};
use kvpack::cpu::{Cpu, CpuIndices, CpuStore, CpuTensor};
use kvpack::plan::TokenRange;
use kvpack::policy::{MeasuredRows, Merging, Nearest, Policy, evicted, merge_plan};
use kvpack::{AttentionShape, Bits, Error, Result, SegmentFormat};
use pollster::block_on;
use proptest::prelude::*;

use any_backend::compressed::growing::{
    append, check_growing_with_every_recipe, compress_again, joined, kept_by_head, spans, statistics,
};
use any_backend::compressed::{Prompt, held, state};
use any_backend::exact::dot;

const LAYERS: usize = 2;

fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

fn tokens(count: usize, seed: u64) -> Prompt {
    Prompt::new(shape(), LAYERS, count, seed)
}

fn cache(recipe: &Recipe) -> ModelCache<Cpu> {
    tokens(1, 1).cache(&Cpu::new(), recipe)
}

#[test]
fn what_grows_is_chosen_from_again() {
    check_growing_with_every_recipe(&Cpu::new(), 1.0);
}

/// The best and the newest of what a head holds, by attention in f64 and nothing of the library's policies. A score
/// that is as good but for rounding may stay in another's place.
fn check_heavy_hitters(held: &[usize], scores: &[f32], kept: &[usize], count: usize) {
    assert_eq!(kept.len(), count);
    assert!(kept.windows(2).all(|pair| pair[0] < pair[1]) && kept.iter().all(|position| held.contains(position)));
    let newest = &held[held.len() - count / 2..];
    assert!(newest.iter().all(|position| kept.contains(position)));
    let score = |position: &usize| scores[held.iter().position(|held| held == position).unwrap()];
    let worst = kept.iter().filter(|position| !newest.contains(position)).map(score).fold(f32::INFINITY, f32::min);
    let best = held.iter().filter(|position| !kept.contains(position)).map(score).fold(0.0, f32::max);
    assert!(worst >= best * (1.0 - 1e-4), "{worst} stayed and {best} went");
}

fn recipes() -> impl Strategy<Value = Recipe> {
    let saw_int4 = Recipe::pack_all(SegmentFormat::saw_int4());
    prop::sample::select(vec![
        Recipe::f16(),
        saw_int4.clone(),
        saw_int4.clone().with_centre().with_sink(40),
        saw_int4.with_window(16),
        Recipe::calibquant(Bits::Four).with_window(0),
    ])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// H2O over random appends, with or without a prompt that was compressed, some of the queries at hand: the tokens
    /// that a model of it keeps, their positions, and what stays is near what was held.
    #[test]
    fn heavy_hitters_stay(
        recipe in recipes(),
        share in prop::sample::select(vec![0.0, 0.1, 0.5, 1.0]),
        prompt in prop::option::of(1usize..150),
        rounds in prop::collection::vec((1usize..200, 1usize..64), 1..4),
        seed in 0u64..1000,
    ) {
        let policy = Policy::h2o(share).unwrap();
        let mut cache = cache(&recipe);
        if let Some(prompt) = prompt.map(|count| tokens(count.max(60), seed)) {
            block_on(cache.compress(0, &prompt.observe(&cache, policy.clone()))).unwrap();
        }
        for (round, (count, rows)) in rounds.into_iter().enumerate() {
            let appended = tokens(count, seed + 1 + round as u64);
            append(&mut cache, 0, &appended);
            let (length, rows) = (cache.length(0).unwrap(), rows.min(count));
            prop_assert_eq!(cache.appended(0), Ok(count));
            prop_assert_eq!(cache.compression_due(0, count + 1), Ok(false));
            prop_assert_eq!(cache.compression_due(0, count), Ok(true));
            let before: Vec<_> = (0..LAYERS).map(|layer| joined(&cache, layer, 0)).collect();
            let selection = compress_again(&mut cache, 0, &policy, (&appended, rows)).unwrap();
            prop_assert_eq!(cache.length(0), Ok(length));
            let budget = (length as f64 * share) as usize;
            for (layer, before) in before.iter().enumerate() {
                let measured = statistics(shape(), before, &appended.queries[layer], rows, None);
                let after = joined(&cache, layer, 0);
                let held = before.positions[0].len();
                for (head, kept) in kept_by_head(&selection, layer).iter().enumerate() {
                    let scores = &measured.column_sums[head * held..][..held];
                    check_heavy_hitters(&before.positions[head], scores, kept, budget.min(held));
                    prop_assert_eq!(&after.positions[head], kept);
                }
            }
        }
        // Nothing is lost of the page tables.
        cache.clear(0).unwrap();
        prop_assert_eq!(cache.memory().in_use_bytes(), 0);
    }
}

/// First and last tokens, whatever came between.
#[test]
fn sinks_and_newest_tokens_stay() {
    let policy = Policy::streaming(4, 60);
    let mut cache = cache(&Recipe::pack_all(SegmentFormat::saw_int4()));
    for round in 0..4 {
        append(&mut cache, 0, &tokens(100, round));
        // It measures nothing, and takes no queries.
        let spans = spans(cache.length(0).unwrap());
        block_on(cache.compress_again(0, &policy, &spans, &[])).unwrap();
        let length = 100 * (round as usize + 1);
        let expected: Vec<usize> = (0..4).chain(length - 60..length).collect();
        for layer in 0..LAYERS {
            assert_eq!(joined(&cache, layer, 0).positions, [expected.clone(), expected.clone()]);
        }
    }
    let gathered = block_on(cache.positions(1, 0)).unwrap();
    assert!(matches!(&gathered[..], [SpanPositions::PerHead(_)]), "{gathered:?}");
    let packed = cache.memory_of(0).unwrap();
    assert_eq!((packed.packed()[0].tokens, packed.f16().tokens), (64, 0));
    // Decoding goes on at the length, and pages of 400 tokens are not held.
    append(&mut cache, 0, &tokens(1, 9));
    assert_eq!((cache.length(0), cache.tokens(0, 0), cache.appended(0)), (Ok(401), Ok(65), Ok(1)));
    cache.truncate(0, 400).unwrap();
    assert!(matches!(cache.truncate(0, 399), Err(Error::Plan { .. })));
}

/// What is evicted later enters kept tokens alone, and those that nothing enters are as they were.
#[test]
fn evicted_tokens_are_merged_again() {
    let policy = Policy { merging: Some(Merging::Pivotal), ..Policy::h2o(0.3).unwrap() };
    let mut cache = cache(&Recipe::f16());
    for round in 0..3 {
        let appended = tokens(90, round);
        append(&mut cache, 0, &appended);
        let before: Vec<_> = (0..LAYERS).map(|layer| joined(&cache, layer, 0)).collect();
        let selection = compress_again(&mut cache, 0, &policy, (&appended, 90)).unwrap();
        for (layer, before) in before.iter().enumerate() {
            let after = joined(&cache, layer, 0);
            for (head, kept) in kept_by_head(&selection, layer).iter().enumerate() {
                let held = &before.positions[head];
                let place = |position: &usize| held.iter().position(|held| held == position).unwrap() as u32;
                let places: Vec<u32> = kept.iter().map(place).collect();
                let key = |place: u32| &before.keys[head][place as usize * 64..][..64];
                let others = evicted(&places, held.len()).unwrap();
                let nearest: Vec<Nearest> = others.iter().map(|&other| nearest(key(other), &places, key)).collect();
                let merges = merge_plan(&places, &others, &nearest, Merging::Pivotal).unwrap();
                for (i, &token) in places.iter().enumerate() {
                    for (rows, stored) in [(&before.keys, &after.keys), (&before.values, &after.values)] {
                        let row = |place: u32| &rows[head][place as usize * 64..][..64];
                        let stored = &stored[head][i * 64..][..64];
                        let into: Vec<_> = merges.iter().filter(|merge| merge.into == token).collect();
                        if into.is_empty() {
                            assert_eq!(stored, row(token), "round {round}: nothing enters it");
                            continue;
                        }
                        for (channel, &x) in stored.iter().enumerate() {
                            let part = |from: u32, weight: f32| f64::from(weight) * f64::from(row(from)[channel]);
                            let y: f64 = into.iter().map(|merge| part(merge.from, merge.weight)).sum();
                            assert!((f64::from(x) - y).abs() <= 2e-3 * y.abs().max(0.1), "round {round}: {x} and {y}");
                        }
                    }
                }
            }
        }
    }
}

fn nearest<'a>(row: &[f32], kept: &[u32], key: impl Fn(u32) -> &'a [f32]) -> Nearest {
    let cosine = |other: &[f32]| (dot(row, other) / (dot(row, row) * dot(other, other)).sqrt()) as f32;
    let of = |(place, &token): (usize, &u32)| Nearest { kept: place as u32, similarity: cosine(key(token)) };
    let best = |best: Nearest, next: Nearest| if next.similarity > best.similarity { next } else { best };
    kept.iter().enumerate().map(of).reduce(best).unwrap()
}

/// Codes of one token decode to what the same codes come of: packed again and again, a token stays near
/// what it was first.
#[test]
fn what_is_packed_again_stays_near_what_it_was() {
    let policy = Policy::streaming(50, 50);
    for format in [SegmentFormat::saw_int4(), SegmentFormat::turboquant_renormalized(Bits::Four, 64)] {
        let mut cache = cache(&Recipe::pack_all(format));
        let first = tokens(50, 3);
        append(&mut cache, 0, &first);
        let dense = |head: usize| (0..50).flat_map(move |token| (token * 2 + head) * 64..(token * 2 + head + 1) * 64);
        let error = |cache: &ModelCache<Cpu>| -> f64 {
            let stored = joined(cache, 0, 0);
            let of = |head: usize| dense(head).map(|i| first.keys[0][i]).zip(stored.keys[head].clone());
            (0..2).flat_map(of).map(|(x, y)| f64::from(x - y).powi(2)).sum()
        };
        let once = error(&cache);
        for round in 0..8 {
            append(&mut cache, 0, &tokens(40, 10 + round));
            let spans = spans(cache.length(0).unwrap());
            block_on(cache.compress_again(0, &policy, &spans, &[])).unwrap();
        }
        let after = error(&cache);
        println!("{format}: squared error {once} packed once, {after} packed nine times");
        assert!(after <= 1.5 * once, "{format}: {once} and {after}");
    }
}

/// Sequences that share pages, and one that comes back from the host.
#[test]
fn what_is_shared_stays_as_it_was() {
    let policy = Policy::h2o(0.25).unwrap();
    let recipe = Recipe::calibquant(Bits::Four).with_window(0);
    let mut cache = cache(&recipe);
    let appended = tokens(300, 8);
    append(&mut cache, 0, &appended);
    // It comes back to layers that part while it is away, too.
    let (together, away) = (held(&cache, 1, 0), block_on(cache.swap_out(0)).unwrap());
    append(&mut cache, 1, &appended);
    compress_again(&mut cache, 1, &policy, (&appended, 300)).unwrap();
    block_on(cache.swap_in(0, &away)).unwrap();
    assert_eq!(held(&cache, 1, 0), together);
    cache.clear(1).unwrap();
    cache.fork(0, 1).unwrap();
    let shared = held(&cache, 1, 1);
    compress_again(&mut cache, 0, &policy, (&appended, 300)).unwrap();
    assert_eq!((held(&cache, 1, 1), cache.tokens(1, 0), cache.tokens(1, 1)), (shared, Ok(75), Ok(300)));
    compress_again(&mut cache, 1, &policy, (&appended, 300)).unwrap();
    assert_eq!(held(&cache, 1, 0), held(&cache, 1, 1));
    append(&mut cache, 0, &tokens(9, 5));
    let (before, swapped) = (held(&cache, 1, 0), block_on(cache.swap_out(0)).unwrap());
    block_on(cache.swap_in(0, &swapped)).unwrap();
    assert_eq!((held(&cache, 1, 0), cache.appended(0)), (before, Ok(9)));
    compress_again(&mut cache, 0, &policy, (&tokens(9, 5), 9)).unwrap();
    assert_eq!(cache.tokens(0, 0), Ok(77));
}

/// A CPU whose n-th span that is written, or decoded, or n-th shard fails.
#[derive(Clone, Default)]
struct Failing {
    cpu: Cpu,
    writes: Rc<Cell<usize>>,
    decodes: Rc<Cell<usize>>,
    shards: Rc<Cell<usize>>,
}

fn fails(countdown: &Cell<usize>) -> Result<()> {
    countdown.set(countdown.get().wrapping_sub(1));
    match countdown.get() {
        0 => Err(Error::Gpu { message: "as ordered".into() }),
        _ => Ok(()),
    }
}

impl Forward for Failing {
    type Inner = Cpu;

    fn inner(&self) -> &Cpu {
        &self.cpu
    }

    async fn add_shard(&self, store: &mut CpuStore, pages: u32) -> Result<()> {
        fails(&self.shards)?;
        kvpack::backend::Storage::add_shard(&self.cpu, store, pages).await
    }

    fn quantize(
        &self,
        store: &mut CpuStore,
        keys: &CpuTensor,
        values: &CpuTensor,
        write: SpanWrite<'_, CpuIndices>,
    ) -> Result<()> {
        fails(&self.writes)?;
        kvpack::backend::Packing::quantize(&self.cpu, store, keys, values, write)
    }

    fn dequantize(&self, store: &CpuStore, read: kvpack::backend::SpanRead<'_>) -> Result<(CpuTensor, CpuTensor)> {
        fails(&self.decodes)?;
        kvpack::backend::Packing::dequantize(&self.cpu, store, read)
    }
}

#[test]
fn a_failure_leaves_every_layer_as_it_was() {
    let backend = Forwarding(Failing::default());
    let (first, second) = (tokens(200, 1), tokens(150, 2));
    for policy in [Policy::snapkv(0.4).unwrap(), Policy::lookm(0.4).unwrap()] {
        let grown = || {
            let mut cache = first.cache(&backend, &Recipe::pack_all(SegmentFormat::saw_int4()).with_window(64));
            block_on(cache.compress(0, &first.observe(&cache, policy.clone()))).unwrap();
            append(&mut cache, 0, &second);
            cache
        };
        let rows = policy.rows_again(150);
        for countdown in [&backend.0.writes, &backend.0.decodes, &backend.0.shards] {
            for failing in 1..=LAYERS {
                let mut cache = grown();
                // Take the pages that are free, so that every layer has to allocate.
                if Rc::ptr_eq(countdown, &backend.0.shards) {
                    let filler = tokens(128 * cache.free_room(0).unwrap()[1].pages, 7);
                    let all = [kvpack::cache::PromptSpan::packed(TokenRange::new(0, filler.tokens).unwrap())];
                    cache.begin_prefill(1, filler.tokens, &all).unwrap();
                    for layer in 0..LAYERS {
                        let dense = filler.dense(&backend, layer);
                        block_on(cache.store_prompt(layer, dense.rows, &dense.keys, &dense.values, &all)).unwrap();
                    }
                    cache.commit().unwrap();
                }
                let before = state(&cache);
                countdown.set(failing);
                let failed = compress_again(&mut cache, 0, &policy, (&second, rows));
                countdown.set(0);
                assert!(matches!(failed, Err(Error::Gpu { .. })), "{failed:?}");
                assert!(state(&cache) == before, "after failure {failing}");
                let selection = compress_again(&mut cache, 0, &policy, (&second, rows)).unwrap();
                assert_eq!(cache.tokens(1, 0), Ok(selection.layers()[1].count()));
                assert_eq!(selection.ratio(), 0.4);
            }
        }
    }
}

#[test]
fn what_cannot_be_compressed_again_is_refused() {
    let recipe = Recipe::pack_all(SegmentFormat::saw_int4());
    let (mut cache, appended) = (cache(&recipe), tokens(100, 4));
    let policy = Policy::h2o(0.2).unwrap();
    append(&mut cache, 0, &appended);
    let before = state(&cache);
    let refused = |result: Result<_>, part: &str| {
        let error = result.map(|_: kvpack::policy::Selection| ()).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    refused(block_on(cache.compress_again(0, &policy, &spans(100), &[])), "queries of 0 layers");
    refused(block_on(cache.compress_again(0, &Policy::streaming(4, 4), &spans(99), &[])), "100");
    refused(block_on(cache.compress_again(2, &policy, &spans(100), &[])), "sequence 2");
    let unmeasured = Policy { rows: MeasuredRows::None, ..policy.clone() };
    refused(block_on(cache.compress_again(0, &unmeasured, &spans(100), &[])), "the best tokens need measured rows");
    refused(compress_again(&mut cache, 0, &policy, (&tokens(101, 4), 101)), "101 query rows of the 100 tokens");
    refused(compress_again(&mut cache, 0, &policy, (&appended, 0)), "row");
    let mut nan = tokens(100, 4);
    nan.queries[1].fill(f32::NAN);
    refused(compress_again(&mut cache, 0, &policy, (&nan, 100)), "NaN");
    assert!(state(&cache) == before);
    // Not again before something came.
    compress_again(&mut cache, 0, &policy, (&appended, 100)).unwrap();
    refused(compress_again(&mut cache, 0, &policy, (&appended, 1)), "1 query rows of the 0 tokens");
    let run = [kvpack::cache::TokenRun::decode(0)];
    block_on(cache.reserve_for_append(&run)).unwrap();
    cache.begin_append(&run).unwrap();
    refused(block_on(cache.compress_again(0, &Policy::streaming(1, 1), &spans(101), &[])), "a step is open");
    cache.abandon();

    // Chunks in the order of their precision are not in that of their tokens.
    let (mut cache, prompt) = (self::cache(&recipe), tokens(64, 4));
    let stores = vec![StoreId::F16, StoreId::PACKED];
    let chunks = ChunkStores::new(TokenRange::new(0, 64).unwrap(), 32, stores).unwrap();
    let spans_of = block_on(chunks.upload(cache.backend(), 2, 64)).unwrap();
    let all = spans_of.prompt();
    block_on(cache.reserve_for_prefill(&all)).unwrap();
    cache.begin_prefill(0, 64, &all).unwrap();
    for layer in 0..LAYERS {
        let dense = prompt.dense(&Cpu::new(), layer);
        block_on(cache.store_prompt(layer, dense.rows, &dense.keys, &dense.values, &all)).unwrap();
    }
    cache.commit().unwrap();
    let before = state(&cache);
    refused(block_on(cache.compress_again(0, &Policy::streaming(4, 4), &spans(64), &[])), "must ascend");
    assert!(state(&cache) == before);
}
