//! Sequences that grow and are compressed again and again, on a backend, and what they must hold then.

use kvpack::backend::{Backend, TensorRows};
use kvpack::cache::{
    KvCache, MeasuredQueries, ModelCache, PromptSpan, Recipe, SpanPositions, StoreId, StoredSpan, TokenRun,
};
use kvpack::cpu::{Cpu, CpuIndices, CpuTensor};
use kvpack::plan::{RowLayout, TokenRange};
use kvpack::policy::{LayerSelection, LayerStatistics, Policy, Selection, Spans};
use kvpack::{AttentionShape, Bits, Result, SegmentFormat};
use pollster::block_on;

use super::Prompt;
use crate::exact::dot;

/// Appends tokens to a sequence, and packs the windows that are full.
pub fn append<B: Backend + Clone>(cache: &mut ModelCache<B>, sequence: usize, tokens: &Prompt) {
    let run = [match tokens.tokens {
        1 => TokenRun::decode(sequence),
        more => TokenRun::chunk(sequence, more),
    }];
    block_on(cache.reserve_for_append(&run)).unwrap();
    cache.begin_append(&run).unwrap();
    for layer in 0..cache.layers() {
        let dense = tokens.dense(cache.backend(), layer);
        block_on(cache.store(layer, dense.rows, &dense.keys, &dense.values)).unwrap();
    }
    cache.commit().unwrap();
    block_on(cache.pack_windows(sequence)).unwrap();
}

/// Compresses a sequence again by the last `rows` queries of the tokens that were appended last; 30 .. 60 are an image.
pub fn compress_again<B: Backend + Clone>(
    cache: &mut ModelCache<B>,
    sequence: usize,
    policy: &Policy,
    (appended, rows): (&Prompt, usize),
) -> Result<Selection> {
    let shape = appended.shape;
    let row = shape.query_heads() * shape.head_dim();
    let upload = |queries: &Vec<f32>| {
        let newest = &queries[(appended.tokens - rows) * row..];
        block_on(cache.backend().upload(newest.into())).unwrap()
    };
    let queries: Vec<B::Tensor> = appended.queries.iter().map(upload).collect();
    let heads = AttentionShape::new(shape.query_heads(), shape.query_heads(), shape.head_dim()).unwrap();
    let layout = RowLayout::token_major(rows, &heads);
    let measured = |tensor| MeasuredQueries { queries: TensorRows { tensor, layout }, known_lse: None };
    let measured: Vec<_> = queries.iter().map(measured).collect();
    let spans = spans(cache.length(sequence)?);
    block_on(cache.compress_again(sequence, policy, &spans, &measured))
}

/// Those of a sequence whose positions 30 to 60 are an image.
pub fn spans(length: usize) -> Spans {
    let image = TokenRange::new(30, length.min(60)).ok();
    Spans::new(length, image.as_slice()).unwrap()
}

/// What a layer holds of a sequence: positions, keys and values, `[kv_heads, tokens]` rows, span after
/// span in every head.
#[derive(Clone, Debug, PartialEq)]
pub struct Joined {
    pub positions: Vec<Vec<usize>>,
    pub keys: Vec<Vec<f32>>,
    pub values: Vec<Vec<f32>>,
}

pub fn joined<B: Backend + Clone>(cache: &ModelCache<B>, layer: usize, sequence: usize) -> Joined {
    let kv_heads = cache.shape(layer).unwrap().kv_heads();
    let rows = || vec![Vec::new(); kv_heads];
    let mut joined = Joined { positions: vec![Vec::new(); kv_heads], keys: rows(), values: rows() };
    let spans: Vec<StoredSpan<B::Tensor>> = cache.dequantize(layer, sequence).unwrap();
    for (span, positions) in spans.iter().zip(block_on(cache.positions(layer, sequence)).unwrap()) {
        let positions = match positions {
            SpanPositions::Run(run) => (run.start()..run.end()).collect::<Vec<_>>().repeat(kv_heads),
            SpanPositions::PerHead(positions) => positions,
        };
        let (keys, values) = (download(cache, &span.keys), download(cache, &span.values));
        for head in 0..kv_heads {
            fn part<T: Clone>(of: &[T], head: usize, heads: usize) -> Vec<T> {
                of[head * of.len() / heads..(head + 1) * of.len() / heads].to_vec()
            }
            joined.positions[head].extend(part(&positions, head, kv_heads));
            joined.keys[head].extend(part(&keys, head, kv_heads));
            joined.values[head].extend(part(&values, head, kv_heads));
        }
    }
    joined
}

fn download<B: Backend + Clone>(cache: &ModelCache<B>, tensor: &B::Tensor) -> Vec<f32> {
    block_on(cache.backend().download(tensor)).unwrap()
}

/// What the CPU stores when it gathers these positions of what was held, in a sequence that began with a layer of this
/// prompt, and decodes.
pub fn gathered_on_cpu(
    (prompt, layer): (&Prompt, usize),
    recipe: &Recipe,
    held: &Joined,
    kept: &[Vec<usize>],
) -> Joined {
    let shape = prompt.shape;
    let mut cache = KvCache::new(Cpu::new(), shape, 1, recipe.clone()).unwrap();
    let tokens = held.positions[0].len();
    let place = |head: usize, position: usize| held.positions[head].iter().position(|&at| at == position).unwrap();
    let places: Vec<u32> = (0..kept.len())
        .flat_map(|head| kept[head].iter().map(move |&position| (head, position)))
        .map(|(head, position)| place(head, position) as u32)
        .collect();
    let indices = CpuIndices::new(&places, shape.kv_heads(), tokens as u32).unwrap();
    let (keys, values) = (CpuTensor::F32(held.keys.concat()), CpuTensor::F32(held.values.concat()));
    let rows = RowLayout::head_major(tokens, &shape);
    // Where the centre comes from.
    let begin = prompt.dense(cache.backend(), layer);
    let all = [PromptSpan::packed(TokenRange::new(0, prompt.tokens).unwrap())];
    block_on(cache.prefill(0, begin.rows, &begin.keys, &begin.values, &all)).unwrap();
    block_on(cache.prefill(0, rows, &keys, &values, &[PromptSpan::gather(&indices, StoreId::PACKED)])).unwrap();
    let span = cache.dequantize(0).unwrap().remove(1);
    let heads = |rows: Vec<f32>| rows.chunks(rows.len() / shape.kv_heads()).map(<[f32]>::to_vec).collect();
    Joined { positions: kept.to_vec(), keys: heads(span.keys.to_f32()), values: heads(span.values.to_f32()) }
}

/// Positions that a selection keeps in a layer, by KV head.
pub fn kept_by_head(selection: &Selection, layer: usize) -> Vec<Vec<usize>> {
    let of = &selection.layers()[layer];
    (0..of.kv_heads()).map(|head| of.kept(head).iter().map(|&position| position as usize).collect()).collect()
}

/// Attention of the last rows over what a layer holds, in f64: mean weights over the query heads of a KV head, and
/// entries at or above the threshold.
pub fn statistics(
    shape: AttentionShape,
    held: &Joined,
    queries: &[f32],
    rows: usize,
    threshold: Option<f32>,
) -> LayerStatistics {
    let (heads, kv_heads, dim) = (shape.query_heads(), shape.kv_heads(), shape.head_dim());
    let tokens = held.positions[0].len();
    let newest = &queries[queries.len() - rows * heads * dim..];
    let mut sums = vec![0.0f64; kv_heads * tokens];
    let mut counts = Vec::new();
    for head in 0..heads {
        let kv_head = head * kv_heads / heads;
        for row in 0..rows {
            let query = &newest[(row * heads + head) * dim..][..dim];
            let score = |token: usize| -> f64 {
                let key = &held.keys[kv_head][token * dim..][..dim];
                dot(query, key) / (dim as f64).sqrt()
            };
            // A token sees itself and what stood before it.
            let own = held.positions[kv_head][tokens - rows + row];
            let seen = held.positions[kv_head].iter().filter(|&&position| position <= own).count();
            let scores: Vec<f64> = (0..seen).map(score).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for (token, weight) in weights.iter().enumerate() {
                sums[kv_head * tokens + token] += weight / sum / (heads / kv_heads) as f64;
            }
            counts.extend(
                threshold
                    .map(|threshold| weights.iter().filter(|&&weight| weight >= f64::from(threshold)).count() as u32),
            );
        }
    }
    LayerStatistics { column_sums: sums.into_iter().map(|sum| sum as f32).collect(), counts }
}

/// What each layer holds, as policies see it.
pub fn as_selection(held: &[Joined], length: usize) -> Selection {
    let of_layer = |held: &Joined| {
        let heads = held.positions.iter().map(|head| head.iter().map(|&position| position as u32).collect()).collect();
        LayerSelection::new(length, heads).unwrap()
    };
    Selection::new(held.iter().map(of_layer).collect()).unwrap()
}

/// A sequence that grows on a device keeps what its policy says of attention over what it held, and stores what the CPU
/// stores of that. `share` of the kept tokens are those of f64 statistics; scores that rounding ranks otherwise are the
/// others. Two runs give the same bits, and the other sequence is as it was. Each policy has one recipe or two
/// ([`pairs`](super::pairs)).
///
/// # Panics
/// When it does not.
pub fn check_growing<B: Backend + Clone>(device: &B, share: f64) {
    check_growing_with(device, share, false);
}

/// The same where every policy has every recipe. Twice in a row runs what devices run.
///
/// # Panics
/// When a sequence is not what [`check_growing`] says.
pub fn check_growing_with_every_recipe<B: Backend + Clone>(device: &B, share: f64) {
    check_growing_with(device, share, true);
}

fn check_growing_with<B: Backend + Clone>(device: &B, share: f64, every_recipe: bool) {
    let shape = AttentionShape::new(4, 2, 64).unwrap();
    let saw_int4 = || Recipe::pack_all(SegmentFormat::saw_int4());
    let recipes = [
        Recipe::f16(),
        saw_int4().with_centre(),
        Recipe::calibquant(Bits::Four).with_window(0),
        saw_int4().with_sink(8).with_window(64),
    ];
    let prompt = Prompt::new(shape, 3, 200, 21);
    let rounds: Vec<Prompt> = [150, 1, 270].iter().zip(31..).map(|(&n, seed)| Prompt::new(shape, 3, n, seed)).collect();
    let policies = super::policies(0.3);
    let pairs = super::pairs(&policies, &recipes);
    for (name, policy, recipe, again) in pairs.filter(|&(.., is_for_devices)| every_recipe || is_for_devices) {
        let run = |check: bool| {
            let mut cache = prompt.cache(device, recipe);
            block_on(cache.compress(0, &prompt.observe(&cache, policy.clone()))).unwrap();
            append(&mut cache, 1, &rounds[0]);
            let other = super::held(&cache, 1, 1);
            for round in &rounds {
                append(&mut cache, 0, round);
                let rows = policy.rows_again(cache.appended(0).unwrap());
                let before: Vec<Joined> = (0..3).map(|layer| joined(&cache, layer, 0)).collect();
                let selection = compress_again(&mut cache, 0, policy, (round, rows)).unwrap();
                if check {
                    check_round(&cache, (name, policy), (&before, &selection), [&prompt, round], share);
                }
            }
            assert_eq!(super::held(&cache, 1, 1), other, "{name}: another sequence");
            super::state(&cache)
        };
        let first = run(true);
        assert!(!again || run(false) == first, "{name}: two runs differ");
    }
}

fn check_round<B: Backend + Clone>(
    cache: &ModelCache<B>,
    (name, policy): (&str, &Policy),
    (before, selection): (&[Joined], &Selection),
    [prompt, round]: [&Prompt; 2],
    share: f64,
) {
    let rows = policy.rows_again(round.tokens);
    let length = cache.length(0).unwrap();
    assert_eq!((cache.appended(0), cache.compression_due(0, 1)), (Ok(0), Ok(false)), "{name}");
    let measured: Vec<LayerStatistics> = before
        .iter()
        .zip(&round.queries)
        .map(|(held, queries)| statistics(round.shape, held, queries, rows, policy.threshold()))
        .collect();
    let held = as_selection(before, length);
    let expected = policy.select_again(&spans(length), &held, rows, &measured).unwrap();
    for (layer, before) in before.iter().enumerate() {
        let (kept, expected) = (kept_by_head(selection, layer), kept_by_head(&expected, layer));
        let after = joined(cache, layer, 0);
        assert_eq!(after.positions, kept, "{name}, layer {layer}");
        assert_eq!(cache.tokens(layer, 0), Ok(kept[0].len()));
        for (kept, expected) in kept.iter().zip(&expected) {
            let shared = kept.iter().filter(|token| expected.contains(token)).count();
            let all = kept.len().max(expected.len());
            assert!(shared as f64 >= share * all as f64, "{name}, layer {layer}: {kept:?} {expected:?}");
        }
        if policy.merging.is_none() {
            let stored = gathered_on_cpu((prompt, layer), cache.recipe(layer).unwrap(), before, &kept);
            assert!(after == stored, "{name}, layer {layer}, {:?}", cache.recipe(layer));
        }
    }
}
