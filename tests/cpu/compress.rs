//! Prompts that policies look at and a cache evicts, merges and packs.

use std::cell::Cell;
use std::rc::Rc;

use kvpack::backend::{Forward, Forwarding, MeasuredAttention, QueriesAndKeys, SpanWrite, TensorRows};
use kvpack::cache::{
    DenseLayer, KvCache, MeasuredQueries, ModelCache, PromptSpan, Recipe, SpanPositions, StoreId, TokenRun,
};
use kvpack::cpu::{Cpu, CpuIndices, CpuStore, CpuTensor};
use kvpack::plan::{ElementType, RowLayout, TokenRange};
use kvpack::policy::{
    BudgetRule, LayerStatistics, MeasuredRows, Merging, Nearest, Policy, Spans, StatsRequest, evicted, merge_plan,
};
use kvpack::{AttentionShape, Bits, Error, Result, SegmentFormat};
use pollster::block_on;

use any_backend::compressed::{Prompt, held, kept, policies, state};
use any_backend::exact;

const LAYERS: usize = 4;

fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

fn prompt() -> Prompt {
    Prompt::new(shape(), LAYERS, 300, 5)
}

fn recipes() -> Vec<Recipe> {
    vec![
        Recipe::f16(),
        Recipe::pack_all(SegmentFormat::saw_int4()),
        Recipe::pack_all(SegmentFormat::saw_int4()).with_centre(),
        Recipe::calibquant(Bits::Two),
        Recipe::calibquant(Bits::Four).with_window(128),
    ]
}

/// A bias of all keys takes the codes of single tokens away, and a centre gives them back, whatever a policy keeps.
#[test]
fn biased_keys_survive_compression_where_they_are_centred() {
    let mut prompt = prompt();
    for key in prompt.keys.iter_mut().flat_map(|keys| keys.chunks_exact_mut(64)) {
        [(9, 300.0), (20, -300.0), (41, 300.0)].into_iter().for_each(|(channel, bias)| key[channel] += bias);
    }
    let formats = [SegmentFormat::saw_int4(), SegmentFormat::turboquant_renormalized(Bits::Four, 64)];
    for ((name, policy), format) in
        policies(0.2).into_iter().flat_map(|policy| formats.map(|format| (policy.clone(), format)))
    {
        let policy = Policy { merging: None, ..policy };
        let error = |recipe: Recipe| {
            let mut cache = prompt.cache(&Cpu::new(), &recipe);
            let observed = prompt.observe(&cache, policy.clone());
            let selection = block_on(cache.compress(0, &observed)).unwrap();
            let mut squares = 0.0;
            for layer in 0..LAYERS {
                let (tokens, keys) = (kept(&selection, layer), held(&cache, layer, 0).remove(0).2);
                for (i, (token, key)) in tokens.iter().zip(keys.chunks_exact(64)).enumerate() {
                    let head = i / (tokens.len() / 2);
                    let dense = &prompt.keys[layer][(token * 2 + head) * 64..][..64];
                    squares += dense.iter().zip(key).map(|(x, y)| f64::from(x - y).powi(2)).sum::<f64>();
                }
            }
            squares
        };
        let (plain, centred) = (error(Recipe::pack_all(format)), error(Recipe::pack_all(format).with_centre()));
        assert!(centred < plain / 100.0, "{name}, {format}: {centred} and {plain}");
    }
}

/// What is kept is what a prefill stores that gathers the same tokens, whatever the policy and the format.
#[test]
fn a_compressed_prompt_is_a_gathered_one() {
    let prompt = prompt();
    for recipe in recipes() {
        for (name, policy) in policies(0.2) {
            let mut cache = prompt.cache(&Cpu::new(), &recipe);
            let observed = prompt.observe(&cache, Policy { merging: None, ..policy });
            let selection = block_on(cache.compress(1, &observed)).unwrap();
            assert_eq!((cache.length(0), cache.length(1)), (Ok(0), Ok(300)));
            for layer in 0..LAYERS {
                let of_layer = &selection.layers()[layer];
                assert_eq!(cache.tokens(layer, 1), Ok(of_layer.count()), "{name}");
                let indices = CpuIndices::new(&of_layer.indices(), 2, 300).unwrap();
                let mut alone = KvCache::new(Cpu::new(), shape(), 1, recipe.clone()).unwrap();
                let DenseLayer { rows, keys, values } = prompt.dense(alone.backend(), layer);
                let spans = [PromptSpan::gather(&indices, StoreId::PACKED)];
                block_on(alone.prefill(0, rows, &keys, &values, &spans)).unwrap();
                let expected = alone.dequantize(0).unwrap().remove(0);
                let (store, positions, keys, values) = held(&cache, layer, 1).remove(0);
                assert_eq!((store, positions), (expected.store, SpanPositions::PerHead(kept(&selection, layer))));
                assert!(keys == expected.keys.to_f32() && values == expected.values.to_f32(), "{name}, layer {layer}");
            }
        }
    }
}

/// What the policy decides on is the attention of the prompt's own queries, here computed in f64.
#[test]
fn selections_are_those_of_measured_attention() {
    let prompt = prompt();
    for (name, policy) in policies(0.25) {
        let cache = prompt.cache(&Cpu::new(), &Recipe::f16());
        let observed = prompt.observe(&cache, policy.clone());
        let rows: Vec<u32> = observed.query_rows().map_or(Vec::new(), |rows| rows.positions().to_vec());
        let layer = |layer| statistics(&prompt, layer, &rows, policy.threshold());
        let statistics: Vec<LayerStatistics> = (0..LAYERS).map(layer).collect();
        let expected = policy.select(&prompt.spans(), LAYERS, 2, &statistics).unwrap();
        assert_eq!(block_on(observed.select()).unwrap(), expected, "{name}");
        // Budgets by sparsity, and those of a pyramid, differ from layer to layer.
        let counts: Vec<usize> = expected.layers().iter().map(|layer| layer.count()).collect();
        let alike = counts.iter().all(|&count| count == counts[0]);
        assert_eq!(alike, !["vlcache", "pyramidkv"].contains(&name), "{name}: {counts:?}");
    }
}

/// Mean weights over the query heads of a KV head, and entries at or above the threshold.
fn statistics(prompt: &Prompt, layer: usize, rows: &[u32], threshold: Option<f32>) -> LayerStatistics {
    let (heads, kv_heads, dim) = (shape().query_heads(), shape().kv_heads(), shape().head_dim());
    let mut sums = vec![0.0f64; kv_heads * prompt.tokens];
    let mut counts = Vec::new();
    for head in 0..heads {
        let kv_head = head * kv_heads / heads;
        for &position in rows {
            let query = &prompt.queries[layer][(position as usize * heads + head) * dim..][..dim];
            let score = |token: usize| -> f64 {
                let key = &prompt.keys[layer][(token * kv_heads + kv_head) * dim..][..dim];
                exact::dot(query, key) / (dim as f64).sqrt()
            };
            let scores: Vec<f64> = (0..=position as usize).map(score).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for (token, weight) in weights.iter().enumerate() {
                sums[kv_head * prompt.tokens + token] += weight / sum / (heads / kv_heads) as f64;
            }
            counts.extend(
                threshold
                    .map(|threshold| weights.iter().filter(|&&weight| weight >= f64::from(threshold)).count() as u32),
            );
        }
    }
    LayerStatistics { column_sums: sums.into_iter().map(|sum| sum as f32).collect(), counts }
}

/// Evicted tokens enter the kept ones as the plan of the policy says, and the positions are those of the kept.
#[test]
fn evicted_tokens_are_merged_into_the_nearest() {
    let prompt = prompt();
    for merging in [Merging::Averaged, Merging::Pivotal, Merging::Weighted] {
        let policy = Policy { merging: Some(merging), ..Policy::lookm(0.2).unwrap() };
        let mut cache = prompt.cache(&Cpu::new(), &Recipe::f16());
        let observed = prompt.observe(&cache, policy);
        let selection = block_on(cache.compress(0, &observed)).unwrap();
        for layer in 0..LAYERS {
            let (_, positions, keys, values) = held(&cache, layer, 0).remove(0);
            assert_eq!(positions, SpanPositions::PerHead(kept(&selection, layer)));
            for head in 0..2 {
                let row = |rows: &[Vec<f32>], token: u32| -> Vec<f64> {
                    let row = &rows[layer][(token as usize * 2 + head) * 64..][..64];
                    row.iter().map(|&x| f64::from(x)).collect()
                };
                let kept = selection.layers()[layer].kept(head);
                let evicted = evicted(kept, prompt.tokens).unwrap();
                let near = |&token: &u32| nearest(&row(&prompt.keys, token), kept, |kept| row(&prompt.keys, kept));
                let nearest: Vec<Nearest> = evicted.iter().map(near).collect();
                let merges = merge_plan(kept, &evicted, &nearest, merging).unwrap();
                for (place, &token) in kept.iter().enumerate() {
                    for (stored, dense) in [(&keys, &prompt.keys), (&values, &prompt.values)] {
                        let into: Vec<_> = merges.iter().filter(|merge| merge.into == token).collect();
                        let mut expected = if into.is_empty() { row(dense, token) } else { vec![0.0; 64] };
                        for merge in into {
                            let from = row(dense, merge.from);
                            expected.iter_mut().zip(from).for_each(|(x, y)| *x += f64::from(merge.weight) * y);
                        }
                        let stored = &stored[(head * kept.len() + place) * 64..][..64];
                        let near = |(&x, &y): (&f32, &f64)| (f64::from(x) - y).abs() <= 2e-3 * y.abs().max(0.1);
                        assert!(stored.iter().zip(&expected).all(near), "layer {layer}, head {head}, token {token}");
                    }
                }
            }
        }
    }
}

fn nearest(row: &[f64], kept: &[u32], key: impl Fn(u32) -> Vec<f64>) -> Nearest {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    let cosine = |other: &[f64]| dot(row, other) / (dot(row, row) * dot(other, other)).sqrt();
    let mut best = Nearest { kept: 0, similarity: f32::NEG_INFINITY };
    for (place, &token) in kept.iter().enumerate() {
        let similarity = cosine(&key(token)) as f32;
        if similarity > best.similarity {
            best = Nearest { kept: place as u32, similarity };
        }
    }
    best
}

#[test]
fn two_runs_give_the_same_bits() {
    let prompt = prompt();
    let run = |policy: &Policy| {
        let mut cache = prompt.cache(&Cpu::new(), &Recipe::calibquant(Bits::Two));
        let observed = prompt.observe(&cache, policy.clone());
        // Into one sequence after the other: what was observed is not used up.
        block_on(cache.compress(0, &observed)).unwrap();
        block_on(cache.compress(1, &observed)).unwrap();
        for layer in 0..LAYERS {
            assert_eq!(held(&cache, layer, 0), held(&cache, layer, 1));
        }
        state(&cache)
    };
    for (name, policy) in policies(0.1) {
        assert!(run(&policy) == run(&policy), "{name}");
    }
}

/// Keys or values of one token.
fn token(value: f32) -> CpuTensor {
    CpuTensor::F32((0..2 * 64).map(|i| (i as f32 + value).sin()).collect())
}

fn decode(cache: &mut ModelCache<Cpu>, sequence: usize, value: f32) -> Vec<Vec<f32>> {
    let run = [TokenRun::decode(sequence)];
    block_on(cache.reserve_for_append(&run)).unwrap();
    cache.begin_append(&run).unwrap();
    let query = CpuTensor::F32((0..4 * 64).map(|i| (i as f32 * 0.3 + value).cos()).collect());
    let of_layer = |layer: usize| {
        let row = token(value + layer as f32);
        block_on(cache.store(layer, RowLayout::token_major(1, &shape()), &row, &row)).unwrap();
        block_on(cache.attend(layer, &query, ElementType::F32)).unwrap().to_f32()
    };
    let outputs = (0..LAYERS).map(of_layer).collect();
    cache.commit().unwrap();
    outputs
}

/// Other sequences are as they were, and both decode on, the compressed one at the position after the prompt.
#[test]
fn decoding_goes_on_after_the_prompt() {
    let prompt = prompt();
    let recipe = Recipe::calibquant(Bits::Four).with_window(0);
    let mut cache = prompt.cache(&Cpu::new(), &recipe);
    let mut other = prompt.cache(&Cpu::new(), &recipe);
    for step in 0..130 {
        assert_eq!(decode(&mut cache, 1, step as f32), decode(&mut other, 1, step as f32));
    }
    let observed = prompt.observe(&cache, Policy::vlcache(0.1).unwrap());
    let selection = block_on(cache.compress(0, &observed)).unwrap();
    for step in 0..140 {
        assert_eq!(decode(&mut cache, 1, step as f32), decode(&mut other, 1, step as f32));
        decode(&mut cache, 0, step as f32);
    }
    for layer in 0..LAYERS {
        let count = selection.layers()[layer].count();
        assert_eq!((cache.length(0), cache.tokens(layer, 0)), (Ok(440), Ok(count + 140)));
        let positions = block_on(cache.positions(layer, 0)).unwrap();
        let run = |start, end| SpanPositions::Run(TokenRange::new(start, end).unwrap());
        assert_eq!(positions[1..], [run(300, 428), run(428, 440)], "a full window was packed");
        assert_eq!(held(&cache, layer, 1), held(&other, layer, 1));
    }
    assert_eq!(cache.memory().in_use_bytes(), {
        let of_layer = |layer| cache.memory_of(layer).unwrap().in_use_bytes();
        (0..LAYERS).map(of_layer).sum::<u64>()
    });
    // A cut goes behind the prompt or before it, not through it.
    assert!(matches!(cache.truncate(0, 200), Err(Error::Plan { .. })));
    cache.truncate(0, 300).unwrap();
    assert_eq!(cache.tokens(2, 0), Ok(selection.layers()[2].count()));
    cache.clear(1).unwrap();
    cache.fork(0, 1).unwrap();
    assert_eq!(held(&cache, 3, 0), held(&cache, 3, 1));
    cache.clear(0).unwrap();
    cache.clear(1).unwrap();
    assert_eq!(cache.memory().in_use_bytes(), 0);
}

/// A second prompt, of a later turn, is selected from for itself.
#[test]
fn prompts_follow_each_other() {
    let prompt = prompt();
    let mut cache = prompt.cache(&Cpu::new(), &Recipe::f16());
    let observed = prompt.observe(&cache, Policy::snapkv(0.2).unwrap());
    let first = block_on(cache.compress(0, &observed)).unwrap();
    decode(&mut cache, 0, 0.5);
    block_on(cache.compress(0, &observed)).unwrap();
    let positions = block_on(cache.positions(1, 0)).unwrap();
    let SpanPositions::PerHead(second) = &positions[2] else { panic!("{positions:?}") };
    assert!(second.iter().eq(kept(&first, 1).iter().map(|position| position + 301).collect::<Vec<_>>().iter()));
    assert_eq!(cache.length(0), Ok(601));
}

/// What was measured once serves every policy that needs no more.
#[test]
fn another_policy_decides_over_the_same_measures() {
    let prompt = prompt();
    let cache = prompt.cache(&Cpu::new(), &Recipe::f16());
    let anew = |policy: Policy| block_on(prompt.observe(&cache, policy).select()).unwrap();
    let uniform = Policy { budget: BudgetRule::Uniform, ..Policy::vlcache(0.2).unwrap() };
    let mut observed = prompt.observe(&cache, Policy::vlcache(0.1).unwrap());
    for policy in [Policy::vlcache(0.3).unwrap(), uniform.clone(), Policy::random(0.3, 1).unwrap()] {
        observed.decide_by(policy.clone()).unwrap();
        assert_eq!(block_on(observed.select()).unwrap(), anew(policy));
    }
    let refused = observed.decide_by(Policy::h2o(0.2).unwrap());
    assert!(matches!(refused, Err(Error::Selection { .. })), "{refused:?}");
    assert_eq!(observed.policy(), &Policy::random(0.3, 1).unwrap());
    // A layer that is observed after that is measured as the others are.
    prompt.observe_layer(&mut observed, &Cpu::new(), 2).unwrap();
    observed.decide_by(Policy::vlcache(0.1).unwrap()).unwrap();
    let unmeasured = Policy { rows: MeasuredRows::None, ..Policy::vlcache(0.1).unwrap() };
    assert!(matches!(observed.decide_by(unmeasured), Err(Error::Selection { .. })), "its scores were not measured");
    assert_eq!(block_on(observed.select()).unwrap(), anew(Policy::vlcache(0.1).unwrap()));
    // Nothing was counted for budgets of one size.
    let mut uncounted = prompt.observe(&cache, uniform);
    assert!(matches!(uncounted.decide_by(Policy::vlcache(0.1).unwrap()), Err(Error::Selection { .. })));
}

#[test]
fn budgets_of_nothing_and_of_all() {
    let prompt = prompt();
    for (name, none) in policies(0.0) {
        let mut cache = prompt.cache(&Cpu::new(), &Recipe::pack_all(SegmentFormat::saw_int4()));
        let observed = prompt.observe(&cache, none);
        block_on(cache.compress(0, &observed)).unwrap();
        let expected = match name {
            "vlcache" => 3, // its bounds leave a hundredth to every layer
            "streaming" => 64,
            _ => 0,
        };
        assert_eq!((cache.tokens(1, 0), cache.length(0)), (Ok(expected), Ok(300)), "{name}");
        decode(&mut cache, 0, 0.5);
        assert_eq!((cache.tokens(1, 0), cache.length(0)), (Ok(expected + 1), Ok(301)), "{name}");
    }
    for (name, all) in policies(1.0).into_iter().filter(|(name, _)| *name != "streaming") {
        let mut cache = prompt.cache(&Cpu::new(), &Recipe::f16());
        let observed = prompt.observe(&cache, all);
        let selection = block_on(cache.compress(0, &observed)).unwrap();
        assert_eq!((selection.ratio(), cache.tokens(2, 0)), (1.0, Ok(300)), "{name}");
    }
}

/// A prompt of one token, and one without images.
#[test]
fn small_prompts() {
    for tokens in [1, 7] {
        let prompt = Prompt::new(shape(), LAYERS, tokens, 3);
        for (name, policy) in policies(0.5) {
            let mut cache = prompt.cache(&Cpu::new(), &Recipe::f16());
            let mut observed = cache.observe(policy, Spans::new(tokens, &[]).unwrap()).unwrap();
            for layer in 0..LAYERS {
                prompt.observe_layer(&mut observed, cache.backend(), layer).unwrap();
            }
            let selection = block_on(cache.compress(0, &observed)).unwrap();
            assert_eq!(
                (cache.tokens(0, 0), cache.length(0)),
                (Ok(selection.layers()[0].count()), Ok(tokens)),
                "{name}"
            );
        }
    }
}

/// A CPU whose n-th gather into pages fails, and whose statistics may be NaN.
#[derive(Clone, Default)]
struct Failing {
    cpu: Cpu,
    writes: Rc<Cell<usize>>,
    shards: Rc<Cell<usize>>,
    measures_nan: Rc<Cell<bool>>,
}

fn fails(countdown: &Cell<usize>) -> Result<()> {
    countdown.set(countdown.get().wrapping_sub(1));
    match countdown.get() {
        // Not out of memory, after which fewer pages are tried.
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

    fn measure_attention(
        &self,
        input: QueriesAndKeys<'_, CpuTensor>,
        request: StatsRequest,
        known_lse: Option<&CpuTensor>,
    ) -> Result<MeasuredAttention<CpuTensor, Vec<u32>>> {
        let mut measured = kvpack::backend::TokenSelection::measure_attention(&self.cpu, input, request, known_lse)?;
        if let (true, CpuTensor::F32(sums)) = (self.measures_nan.get(), &mut measured.column_sums) {
            sums[17] = f32::NAN;
        }
        Ok(measured)
    }
}

#[test]
fn a_failed_compress_leaves_every_layer_as_it_was() {
    let prompt = prompt();
    let backend = Forwarding(Failing::default());
    for policy in [Policy::vlcache(0.3).unwrap(), Policy::lookm(0.3).unwrap()] {
        let mut cache = prompt.cache(&backend, &Recipe::calibquant(Bits::Four));
        let observed = prompt.observe(&cache, policy.clone());
        block_on(cache.compress(1, &observed)).unwrap();
        let before = state(&cache);
        for countdown in [&backend.0.shards, &backend.0.writes] {
            for failing in 1..=LAYERS {
                // Room of its own, so that every layer has to allocate.
                let mut cache = prompt.cache(&backend, &Recipe::calibquant(Bits::Four));
                block_on(cache.compress(1, &observed)).unwrap();
                if Rc::ptr_eq(countdown, &backend.0.shards) {
                    cache = prompt.cache(&backend, &Recipe::calibquant(Bits::Four));
                }
                let empty = state(&cache);
                countdown.set(failing);
                let failed = block_on(cache.compress(0, &observed));
                assert!(matches!(failed, Err(Error::Gpu { .. })), "{failed:?}");
                countdown.set(0);
                assert!(state(&cache) == empty, "after a failure in layer {failing}");
                block_on(cache.compress(0, &observed)).unwrap();
                assert_eq!(held(&cache, 2, 0), before.0[5]);
            }
        }
        backend.0.measures_nan.set(true);
        let nan = prompt.observe(&cache, policy);
        backend.0.measures_nan.set(false);
        let failed = block_on(cache.compress(0, &nan));
        assert_eq!(failed, Err(Error::NotANumber { what: "scores", index: 17 }));
        assert!(state(&cache) == before);
    }
}

#[test]
fn what_cannot_be_compressed_is_refused() {
    let prompt = prompt();
    let mut cache = prompt.cache(&Cpu::new(), &Recipe::f16());
    let h2o = || Policy::h2o(0.2).unwrap();
    assert!(matches!(Policy::vlcache(1.1), Err(Error::Budget { .. })));
    assert!(matches!(Policy::h2o(f64::NAN), Err(Error::Budget { .. })));
    let image = |start, end| TokenRange::new(start, end).unwrap();
    let ends_with_image = Spans::new(300, &[image(30, 300)]).unwrap();
    let refused = cache.observe(Policy::vlcache(0.1).unwrap(), ends_with_image.clone()).map(drop);
    assert_eq!(refused, Err(Error::NoTextAfterImage { image_end: 300, tokens: 300 }));
    assert!(matches!(Spans::new(300, &[image(30, 90), image(80, 100)]), Err(Error::ImageSpans { .. })));

    // A policy that does not look at the text after the image takes such a prompt.
    let mut observed = cache.observe(h2o(), ends_with_image).unwrap();
    let dense = |layer| prompt.dense(&Cpu::new(), layer);
    let (queries, layout) = prompt.measured(observed.query_rows(), &Cpu::new(), 0).unwrap();
    let queries = TensorRows { tensor: &queries, layout };
    let measured = MeasuredQueries { queries, known_lse: None };
    let refused = observed.observe(LAYERS, dense(0), Some(measured));
    assert!(matches!(refused, Err(Error::Plan { what: "layer", .. })), "{refused:?}");
    let refused = observed.observe(0, dense(0), None);
    assert!(matches!(&refused, Err(Error::Selection { reason }) if reason.contains("came without")), "{refused:?}");
    let fewer = DenseLayer { rows: RowLayout::token_major(299, &shape()), ..dense(0) };
    let refused = observed.observe(0, fewer, Some(measured));
    assert!(matches!(&refused, Err(Error::Selection { reason }) if reason.contains("299")), "{refused:?}");
    let short = DenseLayer { values: CpuTensor::F32(vec![0.5; 300 * 128 - 1]), ..dense(0) };
    let refused = observed.observe(0, short, Some(measured));
    assert!(matches!(refused, Err(Error::Elements { what: "values", .. })), "{refused:?}");
    let few_queries = TensorRows { layout: RowLayout { tokens: 299, ..layout }, ..queries };
    let refused = observed.observe(0, dense(0), Some(MeasuredQueries { queries: few_queries, known_lse: None }));
    assert!(matches!(refused, Err(Error::Selection { .. })), "{refused:?}");

    // Queries that are too short are called queries.
    let short = CpuTensor::F32(vec![0.5; 300 * 256 - 1]);
    let few_queries = TensorRows { tensor: &short, layout };
    let refused = observed.observe(0, dense(0), Some(MeasuredQueries { queries: few_queries, known_lse: None }));
    let message = refused.unwrap_err().to_string();
    assert!(message.starts_with("query rows") && !message.contains("KV head"), "{message}");

    // Not before every layer was observed.
    let refused = block_on(cache.compress(0, &observed)).map(drop);
    assert!(matches!(&refused, Err(Error::Selection { reason }) if reason.contains("layer 0")), "{refused:?}");
    let observed = prompt.observe(&cache, h2o());
    assert!(matches!(block_on(cache.compress(2, &observed)), Err(Error::Sequence { .. })));
    let others = vec![(AttentionShape::new(2, 1, 64).unwrap(), Recipe::f16()); LAYERS];
    let mut other = ModelCache::new(&Cpu::new(), &others, 1).unwrap();
    assert!(matches!(block_on(other.compress(0, &observed)), Err(Error::Plan { .. })));
    let run = [TokenRun::decode(0)];
    block_on(cache.reserve_for_append(&run)).unwrap();
    cache.begin_append(&run).unwrap();
    assert!(matches!(block_on(cache.compress(0, &observed)), Err(Error::Plan { .. })));
    cache.abandon();

    // Elements that no format holds, and queries that are no numbers.
    let mut observed = prompt.observe(&cache, h2o());
    let mut nan = dense(2);
    nan.values = CpuTensor::F32(vec![f32::NAN; 300 * 128]);
    observed.observe(2, nan, Some(measured)).unwrap();
    assert!(matches!(block_on(cache.compress(0, &observed)), Err(Error::NotFinite { .. })));
    let nan = CpuTensor::F32(vec![f32::NAN; 300 * 256]);
    let queries = TensorRows { tensor: &nan, layout };
    observed.observe(2, dense(2), Some(MeasuredQueries { queries, known_lse: None })).unwrap();
    assert!(matches!(block_on(cache.compress(0, &observed)), Err(Error::NotANumber { .. })));

    // Entries are counted against the largest of their row, which a known log-sum-exp does not tell.
    let mut observed = cache.observe(Policy::vlcache(0.1).unwrap(), prompt.spans()).unwrap();
    let (queries, layout) = prompt.measured(observed.query_rows(), &Cpu::new(), 0).unwrap();
    let lse = CpuTensor::F32(vec![1.0; 4 * layout.tokens]);
    let measured = MeasuredQueries { queries: TensorRows { tensor: &queries, layout }, known_lse: Some(&lse) };
    assert!(matches!(observed.observe(0, dense(0), Some(measured)), Err(Error::Plan { .. })));
    assert_eq!((cache.length(0), cache.memory().in_use_bytes()), (Ok(0), 0));

    // Layers of different heads share no budget.
    let mut mixed = vec![(shape(), Recipe::f16()), (AttentionShape::new(4, 1, 64).unwrap(), Recipe::f16())];
    let mixed_cache = ModelCache::new(&Cpu::new(), &mixed, 1).unwrap();
    let mut observed = mixed_cache.observe(Policy::random(0.5, 1).unwrap(), prompt.spans()).unwrap();
    for (layer, (shape, _)) in mixed.drain(..).enumerate() {
        let keys = CpuTensor::F32(vec![0.5; 300 * shape.kv_heads() * 64]);
        let dense = DenseLayer { rows: RowLayout::token_major(300, &shape), values: keys.clone(), keys };
        observed.observe(layer, dense, None).unwrap();
    }
    let refused = block_on(observed.select());
    assert!(matches!(&refused, Err(Error::Selection { reason }) if reason.contains("KV heads")), "{refused:?}");
}
