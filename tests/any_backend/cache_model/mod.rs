//! Random operations that a cache and a naive model of it must agree on. For any backend.

mod compare;
pub mod decode_loop;
mod decoded;
pub mod dropped;
mod lost;
mod model;
pub mod recipes;
mod refused;

use half::f16;
use kvpack::backend::{Backend, Forwarding};
use kvpack::cache::{KvCache, PromptSpan, Recipe, StoreId, SwappedSequence};
use kvpack::plan::{Elements, RowLayout, TokenRange};
use kvpack::{AttentionShape, Error};
use pollster::block_on;
use proptest::prelude::*;

use compare::{compare, compare_causal};
use dropped::{Waiting, insist};
use model::{Model, ModelSequence, ModelSpan};
use refused::{Refused, refused};

use crate::random_rows::Random;

/// Sequences of the caches under test.
pub const SEQUENCES: usize = 3;

/// Number of operations from one comparison of all sequences to the next. After every other operation, the sequences
/// that it may change are compared.
const ALL_COMPARED: usize = 5;

/// Something to do to a cache.
#[derive(Clone, Debug)]
pub enum Operation {
    /// Prompt spans by length and store.
    Prefill { sequence: usize, spans: Vec<(usize, u8)>, half: bool },
    /// A prompt whose first tokens are kept in f16, and of the others so many for each store, chosen anew
    /// for every head.
    Evict { sequence: usize, first: usize, others: usize, kept: Vec<(usize, u8)>, half: bool },
    /// So many tokens, one after another, to the sequences whose bit is set.
    Append { tokens: usize, sequences: u8, half: bool },
    /// So many tokens at once, attended to causally, then windows are packed.
    Extend { sequence: usize, tokens: usize, half: bool },
    /// Let a sequence, cleared first, hold what another holds.
    Fork { source: usize, target: usize },
    /// Keep so many hundredths of a sequence's length.
    Truncate { sequence: usize, hundredths: usize },
    /// Forget whole pages between two hundredths of a sequence's length.
    Forget { sequence: usize, hundredths: (usize, usize) },
    /// Forget a sequence.
    Clear { sequence: usize },
    /// Take a sequence to the host, or bring the one that is there into this one.
    Swap { sequence: usize },
    /// Lose the device, where it can be lost. What is on the host comes to a new one.
    Lose,
    /// A call that must fail.
    Refused { call: Refused, at: usize },
}

/// Cases to try: as many as the environment's `PROPTEST_CASES` says, if it says.
pub fn cases(by_default: u32) -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    ProptestConfig { cases: asked.unwrap_or(by_default), failure_persistence: None, ..ProptestConfig::default() }
}

/// Operations to try.
pub fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let length = prop_oneof![1usize..20, 100usize..300, Just(128), Just(256)];
    let newer = prop_oneof![1usize..4, 100usize..150];
    prop::collection::vec(operation(length.boxed(), newer.boxed()), 1..16)
}

/// So many operations of few tokens each, and a lost device somewhere among them.
pub fn short_operations(count: usize) -> impl Strategy<Value = Vec<Operation>> {
    let length = prop_oneof![4 => 1usize..20, 2 => 120usize..140, 1 => Just(128), 1 => 250usize..262];
    let operations = prop::collection::vec(operation(length.boxed(), (1usize..4).boxed()), count - 1);
    (operations, 1..count).prop_map(|(mut operations, at)| {
        operations.insert(at.min(operations.len()), Operation::Lose);
        operations
    })
}

/// An operation with spans of such lengths, and so many appended tokens.
fn operation(length: BoxedStrategy<usize>, newer: BoxedStrategy<usize>) -> impl Strategy<Value = Operation> {
    let spans = prop::collection::vec((length, 0u8..4), 1..4);
    let kept = prop::collection::vec((1usize..200, 0u8..4), 1..3);
    prop_oneof![
        4 => (0..SEQUENCES, spans, any::<bool>()).prop_map(|(sequence, spans, half)| {
            Operation::Prefill { sequence, spans, half }
        }),
        2 => (0..SEQUENCES, 0usize..150, 1usize..300, kept, any::<bool>()).prop_map(
            |(sequence, first, others, kept, half)| Operation::Evict { sequence, first, others, kept, half }
        ),
        4 => (newer, 1u8..8, any::<bool>()).prop_map(|(tokens, sequences, half)| {
            Operation::Append { tokens, sequences, half }
        }),
        2 => (0..SEQUENCES, prop_oneof![1usize..4, 100usize..300], any::<bool>()).prop_map(|(sequence, tokens, half)| {
            Operation::Extend { sequence, tokens, half }
        }),
        2 => (0..SEQUENCES, 1..SEQUENCES).prop_map(|(source, by)| {
            Operation::Fork { source, target: (source + by) % SEQUENCES }
        }),
        2 => (0..SEQUENCES, 0usize..101).prop_map(|(sequence, hundredths)| Operation::Truncate { sequence, hundredths }),
        1 => (0..SEQUENCES, 0usize..80, 1usize..60).prop_map(|(sequence, start, length)| {
            Operation::Forget { sequence, hundredths: (start, start + length) }
        }),
        1 => (0..SEQUENCES).prop_map(|sequence| Operation::Clear { sequence }),
        2 => (0..SEQUENCES).prop_map(|sequence| Operation::Swap { sequence }),
        1 => (prop::sample::select(Refused::ALL.to_vec()), 0usize..1000).prop_map(|(call, at)| {
            Operation::Refused { call, at }
        }),
    ]
}

impl Operation {
    /// The sequences that it may change.
    fn changes(&self) -> Vec<usize> {
        match self {
            Self::Prefill { sequence, .. }
            | Self::Evict { sequence, .. }
            | Self::Extend { sequence, .. }
            | Self::Truncate { sequence, .. }
            | Self::Forget { sequence, .. }
            | Self::Clear { sequence }
            | Self::Swap { sequence } => vec![*sequence],
            Self::Fork { source, target } => vec![*source, *target],
            Self::Append { sequences, .. } => (0..SEQUENCES).filter(|s| sequences >> s & 1 == 1).collect(),
            Self::Lose | Self::Refused { .. } => (0..SEQUENCES).collect(),
        }
    }
}

/// Runs operations on a cache and on the model and compares them after each.
///
/// # Panics
/// When they disagree.
pub fn check<B: Backend + Clone>(
    backend: B,
    shape: AttentionShape,
    recipe: &Recipe,
    operations: &[Operation],
    seed: u64,
) {
    let open = || backend.clone();
    check_losing(Subject { open, lose: |_: &B| {}, most_tokens: usize::MAX }, shape, recipe, operations, seed);
}

/// A backend under test.
pub struct Subject<O, L> {
    /// Opens the device, or another one after it was lost.
    pub open: O,
    /// Loses the device.
    pub lose: L,
    /// A sequence is cleared when it holds more tokens.
    pub most_tokens: usize,
}

/// [`check`] on a device that may be lost.
///
/// # Panics
/// When cache and model disagree.
pub fn check_losing<B: Backend>(
    subject: Subject<impl Fn() -> B, impl Fn(&B)>,
    shape: AttentionShape,
    recipe: &Recipe,
    operations: &[Operation],
    seed: u64,
) {
    let create = || KvCache::new(Forwarding(Waiting((subject.open)())), shape, SEQUENCES, recipe.clone()).unwrap();
    let sequences = vec![ModelSequence::default(); SEQUENCES];
    let mut model = Model { shape, recipe: recipe.clone(), sequences, next_page: 0 };
    let (mut cache, mut random, mut swapped) = (create(), Random::new(seed), None);
    for (index, operation) in operations.iter().enumerate() {
        match operation {
            Operation::Swap { sequence } => swap(&mut cache, &mut model, *sequence, &mut swapped, &mut random),
            Operation::Lose => {
                lost::lose(&mut cache, &mut random, |backend| (subject.lose)(&backend.0.0));
                cache = create();
                model.sequences.fill(ModelSequence::default());
                // The positions of gathered tokens stay on the device.
                swapped = swapped
                    .filter(|(_, held): &(_, ModelSequence)| held.spans.iter().all(|span| span.gathered.is_none()));
            }
            _ => apply(&mut cache, &mut model, operation, &mut random),
        }
        for sequence in 0..SEQUENCES {
            if cache.tokens(sequence).unwrap() > subject.most_tokens {
                apply(&mut cache, &mut model, &Operation::Clear { sequence }, &mut random);
            }
        }
        let all = (index + 1).is_multiple_of(ALL_COMPARED) || index + 1 == operations.len();
        let sequences = if all { (0..SEQUENCES).collect() } else { operation.changes() };
        compare(&cache, &model, &sequences, &mut random);
    }
}

/// Random keys of so many tokens, with a bias of 300 in three channels of every head where the recipe takes it away.
fn keys<B: Backend>(cache: &KvCache<B>, random: &mut Random, tokens: usize, half: bool) -> (Vec<f32>, B::Tensor) {
    let head_dim = cache.shape().head_dim();
    let elements = tokens * cache.shape().kv_heads() * head_dim;
    let bias = if cache.recipe().is_centred() { [300.0, -300.0, 300.0] } else { [0.0; 3] };
    let biased = |channel: usize| bias.get(channel.wrapping_sub(7)).copied().unwrap_or(0.0);
    tensor_of(cache.backend(), random, elements, half, |i| biased(i % head_dim))
}

/// Random rows, rounded to f16 if `half`, and the tensor that holds them.
fn rows<B: Backend>(backend: &B, random: &mut Random, elements: usize, half: bool) -> (Vec<f32>, B::Tensor) {
    tensor_of(backend, random, elements, half, |_| 0.0)
}

fn tensor_of<B: Backend>(
    backend: &B,
    random: &mut Random,
    elements: usize,
    half: bool,
    bias: impl Fn(usize) -> f32,
) -> (Vec<f32>, B::Tensor) {
    let offset = random.unit();
    let rows: Vec<f32> = (0..elements).map(|i| random.normal() + offset + bias(i)).collect();
    if half {
        let halves: Vec<f16> = rows.iter().map(|&x| f16::from_f32(x)).collect();
        let tensor = block_on(backend.upload(Elements::F16(&halves))).unwrap();
        return (halves.iter().map(|x| x.to_f32()).collect(), tensor);
    }
    let tensor = block_on(backend.upload(Elements::F32(&rows))).unwrap();
    (rows, tensor)
}

/// The store of a recipe that a number chooses.
fn chosen(recipe: &Recipe, store: u8) -> StoreId {
    StoreId(store % recipe.stores().len() as u8)
}

fn apply<B: Backend>(cache: &mut KvCache<B>, model: &mut Model, operation: &Operation, random: &mut Random) {
    let shape = model.shape;
    let row = model.row_elements();
    match operation {
        Operation::Prefill { sequence, spans, half } => {
            let tokens = spans.iter().map(|&(tokens, _)| tokens).sum();
            let (keys, key_tensor) = keys(cache, random, tokens, *half);
            let keys = model.centred(*sequence, &keys);
            let (values, value_tensor) = rows(cache.backend(), random, tokens * row, *half);
            let base = model.sequences[*sequence].length;
            let mut start = 0;
            let mut prompt = Vec::new();
            for &(tokens, store) in spans {
                let store = chosen(&model.recipe, store);
                prompt.push(PromptSpan::run(TokenRange::new(start, start + tokens).unwrap(), store));
                let positions: Vec<usize> = (base + start..base + start + tokens).collect();
                let span = ModelSpan {
                    positions: vec![positions; shape.kv_heads()],
                    keys: keys[start * row..(start + tokens) * row].to_vec(),
                    values: values[start * row..(start + tokens) * row].to_vec(),
                    ..ModelSpan::empty(model.resolved(store), shape.kv_heads())
                };
                model.push_span(*sequence, span);
                start += tokens;
            }
            model.sequences[*sequence].length += tokens;
            let layout = RowLayout::token_major(tokens, &shape);
            let prefill = async |cache: &mut KvCache<B>| {
                cache.prefill(*sequence, layout, &key_tensor, &value_tensor, &prompt).await
            };
            insist(cache, random, prefill).unwrap();
        }
        Operation::Evict { sequence, first, others, kept, half } => {
            let tokens = first + others;
            let (keys, key_tensor) = keys(cache, random, tokens, *half);
            let keys = (model.centred(*sequence, &keys), key_tensor);
            let dense = [keys, rows(cache.backend(), random, tokens * row, *half)];
            evict(cache, model, (*sequence, *first, tokens), kept, &dense, random);
        }
        Operation::Append { tokens, sequences, half } => {
            let sequences: Vec<usize> = (0..SEQUENCES).filter(|s| sequences >> s & 1 == 1).collect();
            for _ in 0..*tokens {
                let (keys, key_tensor) = keys(cache, random, sequences.len(), *half);
                let (values, value_tensor) = rows(cache.backend(), random, sequences.len() * row, *half);
                for (i, &sequence) in sequences.iter().enumerate() {
                    let key = model.centred(sequence, &keys[i * row..][..row]);
                    model.push_token(sequence, &key, &values[i * row..][..row]);
                    model.pack_windows(sequence, 1);
                }
                let layout = RowLayout::token_major(sequences.len(), &shape);
                let append = async |cache: &mut KvCache<B>| {
                    cache.append_to(&sequences, layout, &key_tensor, &value_tensor).await
                };
                insist(cache, random, append).unwrap();
            }
        }
        Operation::Extend { sequence, tokens, half } => {
            let (keys, key_tensor) = keys(cache, random, *tokens, *half);
            let keys = model.centred(*sequence, &keys);
            let (values, value_tensor) = rows(cache.backend(), random, tokens * row, *half);
            for (key, value) in keys.chunks(row).zip(values.chunks(row)) {
                model.push_token(*sequence, key, value);
            }
            let layout = RowLayout::token_major(*tokens, &shape);
            let extend =
                async |cache: &mut KvCache<B>| cache.extend(*sequence, layout, &key_tensor, &value_tensor).await;
            insist(cache, random, extend).unwrap();
            compare_causal(cache, *sequence, (*tokens).min(3), random);
            model.pack_windows(*sequence, usize::MAX);
            insist(cache, random, async |cache: &mut KvCache<B>| cache.pack_windows(*sequence).await).unwrap();
        }
        Operation::Fork { source, target } => {
            if model.sequences[*target].length > 0 {
                assert!(matches!(cache.fork(*source, *target), Err(Error::Plan { .. })));
            }
            cache.clear(*target).unwrap();
            cache.fork(*source, *target).unwrap();
            model.sequences[*target] = model.sequences[*source].clone();
        }
        Operation::Truncate { sequence, hundredths } => {
            let length = cache.length(*sequence).unwrap();
            assert!(matches!(cache.truncate(*sequence, length + 1), Err(Error::Plan { .. })));
            let kept = length * hundredths / 100;
            let truncated = cache.truncate(*sequence, kept);
            assert_eq!(truncated.is_ok(), model.truncate(*sequence, kept), "{truncated:?}");
        }
        Operation::Forget { sequence, hundredths: (start, end) } => {
            let length = cache.length(*sequence).unwrap();
            if let Ok(positions) = TokenRange::new(length * start / 100, length * end / 100) {
                cache.forget(*sequence, positions).unwrap();
                model.forget(*sequence, positions.start(), positions.end());
            }
        }
        Operation::Clear { sequence } => {
            model.sequences[*sequence] = ModelSequence::default();
            cache.clear(*sequence).unwrap();
        }
        Operation::Refused { call, at } => refused(cache, model, *call, *at, random),
        Operation::Swap { .. } | Operation::Lose => unreachable!("the caller keeps what is swapped out"),
    }
}

/// Takes a sequence out where none is, and brings it in otherwise, if there is room for it.
fn swap<B: Backend>(
    cache: &mut KvCache<B>,
    model: &mut Model,
    sequence: usize,
    swapped: &mut Option<(SwappedSequence<B::Indices>, ModelSequence)>,
    random: &mut Random,
) {
    let Some((bytes, held)) = swapped.take() else {
        let bytes = insist(cache, random, async |cache: &mut KvCache<B>| cache.swap_out(sequence).await).unwrap();
        assert_eq!(bytes.length(), model.sequences[sequence].length);
        *swapped = Some((bytes, std::mem::take(&mut model.sequences[sequence])));
        return;
    };
    let brought = insist(cache, random, async |cache: &mut KvCache<B>| cache.swap_in(sequence, &bytes).await);
    if model.sequences[sequence].length > 0 || model.sequences[sequence].centre.is_some() {
        assert!(matches!(brought, Err(Error::Plan { .. })), "{brought:?}");
        *swapped = Some((bytes, held));
        return;
    }
    brought.unwrap();
    model.restore(sequence, held);
}

/// A prompt of `tokens` tokens of which the `first` ones stay in f16, and of the others those that random indices name.
fn evict<B: Backend>(
    cache: &mut KvCache<B>,
    model: &mut Model,
    (sequence, first, tokens): (usize, usize, usize),
    kept: &[(usize, u8)],
    dense: &[(Vec<f32>, B::Tensor); 2],
    random: &mut Random,
) {
    let shape = model.shape;
    let (kv_heads, head_dim, row) = (shape.kv_heads(), shape.head_dim(), model.row_elements());
    let base = model.sequences[sequence].length;
    let gathered: Vec<(Vec<u32>, StoreId)> = kept
        .iter()
        .map(|&(count, store)| {
            let count = count.min(tokens - first);
            let named = (0..kv_heads * count).map(|_| (first + random.below(tokens - first)) as u32).collect();
            (named, chosen(&model.recipe, store))
        })
        .collect();
    let upload = |named: &[u32]| block_on(cache.backend().upload_indices(named, kv_heads, tokens as u32)).unwrap();
    let indices: Vec<B::Indices> = gathered.iter().map(|(named, _)| upload(named)).collect();
    let mut prompt = Vec::new();
    if first > 0 {
        prompt.push(PromptSpan::f16(TokenRange::new(0, first).unwrap()));
        let span = ModelSpan {
            positions: vec![(base..base + first).collect(); kv_heads],
            keys: dense[0].0[..first * row].to_vec(),
            values: dense[1].0[..first * row].to_vec(),
            ..ModelSpan::empty(StoreId::F16, kv_heads)
        };
        model.push_span(sequence, span);
    }
    for ((named, store), indices) in gathered.iter().zip(&indices) {
        prompt.push(PromptSpan::gather(indices, *store));
        let count = named.len() / kv_heads;
        let token_rows = |rows: &[f32]| -> Vec<f32> {
            let of = |i: usize| {
                let (token, head) = (i / kv_heads, i % kv_heads);
                &rows[named[head * count + token] as usize * row + head * head_dim..][..head_dim]
            };
            (0..count * kv_heads).flat_map(of).copied().collect()
        };
        let position = |index: &u32| base + *index as usize;
        let span = ModelSpan {
            positions: named.chunks(count).map(|head| head.iter().map(position).collect()).collect(),
            gathered: Some((base, base + tokens)),
            keys: token_rows(&dense[0].0),
            values: token_rows(&dense[1].0),
            ..ModelSpan::empty(model.resolved(*store), kv_heads)
        };
        model.push_span(sequence, span);
    }
    model.sequences[sequence].length += tokens;
    let layout = RowLayout::token_major(tokens, &shape);
    let [(_, keys), (_, values)] = dense;
    let prefill = async |cache: &mut KvCache<B>| cache.prefill(sequence, layout, keys, values, &prompt).await;
    insist(cache, random, prefill).unwrap();
}
