//! What a cache holds and computes against what the model says.

use kvpack::AttentionShape;
use kvpack::backend::Backend;
use kvpack::cache::{KvCache, SpanPositions};
use kvpack::cpu::{DenseSegment, exact_attention, nmse};
use kvpack::format::KeyOrValue;
use kvpack::plan::{ElementType, QueryRun};
use pollster::block_on;

use super::model::{Model, ModelSpan};
use super::{SEQUENCES, rows};
use crate::random_rows::Random;

/// Compares lengths and bytes with the model's, and of some sequences stored rows, positions and, with f64 over the stored
/// rows, attention.
pub fn compare<B: Backend>(cache: &KvCache<B>, model: &Model, sequences: &[usize], random: &mut Random) {
    let shape = model.shape;
    for (sequence, of) in model.sequences.iter().enumerate() {
        assert_eq!((cache.tokens(sequence), cache.length(sequence)), (Ok(of.tokens()), Ok(of.length)));
    }
    let mut dense: [Vec<_>; SEQUENCES] = Default::default();
    for &sequence in sequences {
        let spans = cache.dequantize(sequence).unwrap();
        let mut stored = [Vec::new(), Vec::new()];
        let mut segments = Vec::new();
        for span in &spans {
            let keys = block_on(cache.backend().download(&span.keys)).unwrap();
            let values = block_on(cache.backend().download(&span.values)).unwrap();
            stored[0].extend(token_major(&keys, span.tokens, &shape));
            stored[1].extend(token_major(&values, span.tokens, &shape));
            assert_eq!(span.format, cache.recipe().stores()[span.store.index()].format);
            segments.push((keys, values, span.tokens, span.calibration));
        }
        assert!(stored[0] == model.decoded(sequence, KeyOrValue::Key), "keys of sequence {sequence}");
        assert!(stored[1] == model.decoded(sequence, KeyOrValue::Value), "values of sequence {sequence}");
        compare_positions(cache, sequence, &model.sequences[sequence].spans);
        dense[sequence] = segments;
    }
    check_memory(cache, &model.pages());

    let per_query = shape.query_heads() * shape.head_dim();
    let (held, empty): (Vec<usize>, Vec<usize>) = sequences.iter().rev().partition(|&&s| !dense[s].is_empty());
    if !empty.is_empty() {
        let (_, tensor) = rows(cache.backend(), random, empty.len() * per_query, false);
        let output = block_on(cache.attend_to(&empty, &tensor, ElementType::F32)).unwrap();
        let output = block_on(cache.backend().download(&output)).unwrap();
        assert!(output.iter().all(|&x| x == 0.0), "sequences without tokens");
    }
    if held.is_empty() {
        return;
    }
    let (query, tensor) = rows(cache.backend(), random, held.len() * per_query, false);
    let output = block_on(cache.attend_to(&held, &tensor, ElementType::F32)).unwrap();
    let output = block_on(cache.backend().download(&output)).unwrap();
    let runs: Vec<QueryRun> = held.iter().map(|&sequence| QueryRun::decode(sequence)).collect();
    let states = block_on(cache.attend_states(&runs, &tensor)).unwrap();
    let lse = block_on(cache.backend().download(&states.lse)).unwrap();
    for (i, &sequence) in held.iter().enumerate() {
        let segments: Vec<DenseSegment<'_>> = dense[sequence]
            .iter()
            .map(|(keys, values, tokens, calibration)| DenseSegment {
                keys,
                values,
                tokens: *tokens,
                calibration: *calibration,
            })
            .collect();
        let exact = exact_attention(&shape, &segments, &query[i * per_query..][..per_query]).unwrap();
        let error = nmse(&output[i * per_query..][..per_query], &exact.outputs);
        assert!(error < 1e-6, "sequence {sequence}: NMSE {error}");
        for (lse, exact) in lse[i * shape.query_heads()..].iter().zip(&exact.lse) {
            assert!(
                (f64::from(*lse) - exact).abs() < 1e-3 * (1.0 + exact.abs()),
                "sequence {sequence}: {lse}, not {exact}"
            );
        }
    }
}

/// Positions of all tokens, in the order in which they are stored. Spans of the cache may be several of the model's.
fn compare_positions<B: Backend>(cache: &KvCache<B>, sequence: usize, spans: &[ModelSpan]) {
    let kv_heads = cache.shape().kv_heads();
    let mut found = vec![Vec::new(); kv_heads];
    for span in block_on(cache.positions(sequence)).unwrap() {
        for (head, found) in found.iter_mut().enumerate() {
            match &span {
                SpanPositions::Run(run) => found.extend(run.start()..run.end()),
                SpanPositions::PerHead(positions) => {
                    let count = positions.len() / kv_heads;
                    found.extend_from_slice(&positions[head * count..][..count]);
                }
            }
        }
    }
    for (head, found) in found.iter().enumerate() {
        let expected: Vec<usize> = spans.iter().flat_map(|span| &span.positions[head]).copied().collect();
        assert_eq!(*found, expected, "positions of sequence {sequence}, KV head {head}");
    }
}

/// The newest tokens' queries against f64 attention over what each of them sees.
pub fn compare_causal<B: Backend>(cache: &KvCache<B>, sequence: usize, count: usize, random: &mut Random) {
    let shape = *cache.shape();
    let per_query = shape.query_heads() * shape.head_dim();
    let (queries, tensor) = rows(cache.backend(), random, count * per_query, false);
    let output = block_on(cache.attend_causal(sequence, &tensor, ElementType::F32)).unwrap();
    let output = block_on(cache.backend().download(&output)).unwrap();
    let spans = cache.dequantize(sequence).unwrap();
    let download = |tensor| block_on(cache.backend().download(tensor)).unwrap();
    let dense: Vec<_> = spans.iter().map(|span| (download(&span.keys), download(&span.values), span)).collect();
    let tokens = cache.tokens(sequence).unwrap();
    for (i, query) in queries.chunks(per_query).enumerate() {
        let mut unseen = tokens - count + 1 + i;
        let mut seen = Vec::new();
        for (keys, values, span) in &dense {
            let tokens = span.tokens.min(unseen);
            unseen -= tokens;
            let head = span.tokens * shape.head_dim();
            let first = |rows: &[f32]| -> Vec<f32> {
                rows.chunks(head).flat_map(|rows| rows[..tokens * shape.head_dim()].to_vec()).collect()
            };
            seen.push((first(keys), first(values), tokens, span.calibration));
        }
        let segments: Vec<DenseSegment<'_>> = seen
            .iter()
            .filter(|(_, _, tokens, _)| *tokens > 0)
            .map(|(keys, values, tokens, calibration)| DenseSegment {
                keys,
                values,
                tokens: *tokens,
                calibration: *calibration,
            })
            .collect();
        let exact = exact_attention(&shape, &segments, query).unwrap();
        let error = nmse(&output[i * per_query..][..per_query], &exact.outputs);
        assert!(error < 1e-6, "causal query {i} of {count}: NMSE {error}");
    }
}

/// Every page in use belongs to a span, and the bytes follow from the pages.
fn check_memory<B: Backend>(cache: &KvCache<B>, pages: &[usize]) {
    let memory = cache.memory();
    assert_eq!(memory.stores().len(), pages.len());
    for (store, &pages) in memory.stores().iter().zip(pages) {
        assert_eq!(store.pages_in_use, pages, "{}", store.format);
        assert!(store.in_use_bytes >= (pages * store.format.page_bytes(cache.shape())) as u64);
        assert!(store.allocated_bytes >= store.in_use_bytes);
        let centred = cache.recipe().is_centred();
        assert!(centred || (store.tokens == 0) == (store.in_use_bytes == 0));
    }
}

/// `[kv_heads, tokens, head_dim]` as `[tokens, kv_heads, head_dim]`.
fn token_major(rows: &[f32], tokens: usize, shape: &AttentionShape) -> Vec<f32> {
    let head_dim = shape.head_dim();
    let row = |i: usize| {
        let (token, head) = (i / shape.kv_heads(), i % shape.kv_heads());
        &rows[(head * tokens + token) * head_dim..][..head_dim]
    };
    (0..tokens * shape.kv_heads()).flat_map(row).copied().collect()
}
