//! The cache of a model against one cache per layer: whatever is done to it, its layers hold what they
//! would hold alone.

use std::cell::Cell;

use kvpack::backend::{Backend, FlaggedToken, Forward, Forwarding, Packing, WriteInput};
use kvpack::cache::{KvCache, ModelCache, PromptSpan, Recipe, StoreId, StoreRoom, TokenRun};
use kvpack::cpu::{Cpu, CpuStore, CpuTensor, NonFiniteFlags};
use kvpack::format::KeyOrValue;
use kvpack::plan::{ElementType, QueryRun, RowLayout, TokenRange, WriteTable};
use kvpack::{AttentionShape, Bits, Error, Result, SegmentFormat};
use pollster::block_on;
use proptest::prelude::*;

use any_backend::random_rows::Random;

const SEQUENCES: usize = 3;

/// Layers of two kinds, mixed, and a third kind of other heads.
fn layers() -> Vec<(AttentionShape, Recipe)> {
    let shape = AttentionShape::new(4, 2, 64).unwrap();
    let tokens = Recipe::pack_all(SegmentFormat::saw_int4()).with_sink(20);
    let tiles = Recipe::calibquant(Bits::Two).with_window(40);
    let few = (AttentionShape::new(2, 1, 64).unwrap(), tiles.clone());
    vec![(shape, tokens.clone()), (shape, tiles.clone()), few, (shape, tokens), (shape, tiles)]
}

#[derive(Clone, Debug)]
enum Operation {
    Prefill {
        sequence: usize,
        spans: Vec<(usize, bool)>,
    },
    /// A step of a decoded token (1) or a chunk for every sequence, none for 0.
    Append {
        tokens: [usize; SEQUENCES],
        abandoned: bool,
    },
    Fork {
        source: usize,
        target: usize,
    },
    Truncate {
        sequence: usize,
        hundredths: usize,
    },
    Forget {
        sequence: usize,
        hundredths: usize,
    },
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let spans = prop::collection::vec((1usize..200, any::<bool>()), 1..4);
    let tokens = || prop_oneof![3 => Just(1usize), 1 => Just(0), 1 => 2usize..200];
    let operation = prop_oneof![
        2 => (0..SEQUENCES, spans).prop_map(|(sequence, spans)| Operation::Prefill { sequence, spans }),
        6 => ([tokens(), tokens(), tokens()], any::<bool>()).prop_map(|(tokens, abandoned)| {
            Operation::Append { tokens, abandoned }
        }),
        1 => (0..SEQUENCES, 1..SEQUENCES).prop_map(|(source, by)| {
            Operation::Fork { source, target: (source + by) % SEQUENCES }
        }),
        1 => (0..SEQUENCES, 0usize..101).prop_map(|(sequence, hundredths)| Operation::Truncate { sequence, hundredths }),
        1 => (0..SEQUENCES, 1usize..101).prop_map(|(sequence, hundredths)| Operation::Forget { sequence, hundredths }),
    ];
    prop::collection::vec(operation, 1..12)
}

/// What is stored is the same to the bit, and outputs but for the order of their sums: room that is made for a whole
/// step may lie in other shards than room that is made run by run, and spans are cut where the shard changes.
fn assert_close(outputs: &[f32], expected: &[f32], layer: usize) {
    assert_eq!(outputs.len(), expected.len(), "layer {layer}");
    let far = outputs.iter().zip(expected).position(|(output, expected)| {
        // NaN is far.
        let near = (output - expected).abs() <= 4e-6 * (1.0 + expected.abs());
        !near
    });
    assert_eq!(far.map(|at| (at, outputs[at], expected[at])), None, "layer {layer}");
}

/// The cache of a model, and a cache for each of its layers.
struct Both {
    model: ModelCache<Cpu>,
    alone: Vec<KvCache<Cpu>>,
    random: Random,
}

impl Both {
    fn new(seed: u64) -> Self {
        let model = ModelCache::new(&Cpu::new(), &layers(), SEQUENCES).unwrap();
        let alone = layers().into_iter().map(|(shape, recipe)| KvCache::new(Cpu::new(), shape, SEQUENCES, recipe));
        Self { model, alone: alone.collect::<Result<_>>().unwrap(), random: Random::new(seed) }
    }

    fn rows(&mut self, elements: usize) -> CpuTensor {
        CpuTensor::F32((0..elements).map(|_| self.random.normal()).collect())
    }

    fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Prefill { sequence, spans } => self.prefill(*sequence, spans),
            Operation::Append { tokens, abandoned } => self.append(tokens, *abandoned),
            Operation::Fork { source, target } => {
                self.model.clear(*target).unwrap();
                self.model.fork(*source, *target).unwrap();
                for cache in &mut self.alone {
                    cache.clear(*target).unwrap();
                    cache.fork(*source, *target).unwrap();
                }
            }
            Operation::Truncate { sequence, hundredths } => {
                let length = self.model.length(*sequence).unwrap() * hundredths / 100;
                self.model.truncate(*sequence, length).unwrap();
                self.alone.iter_mut().for_each(|cache| cache.truncate(*sequence, length).unwrap());
            }
            Operation::Forget { sequence, hundredths } => {
                let end = self.model.length(*sequence).unwrap() * hundredths / 100;
                let Ok(positions) = TokenRange::new(0, end) else { return };
                self.model.forget(*sequence, positions).unwrap();
                self.alone.iter_mut().for_each(|cache| cache.forget(*sequence, positions).unwrap());
            }
        }
    }

    fn prefill(&mut self, sequence: usize, spans: &[(usize, bool)]) {
        let mut tokens = 0;
        let prompt = spans.iter().map(|&(of_span, packed)| {
            let run = TokenRange::new(tokens, tokens + of_span).unwrap();
            tokens += of_span;
            PromptSpan::run(run, if packed { StoreId::PACKED } else { StoreId::F16 })
        });
        let prompt: Vec<_> = prompt.collect();
        block_on(self.model.reserve_for_prefill(&prompt)).unwrap();
        self.model.begin_prefill(sequence, tokens, &prompt).unwrap();
        for layer in 0..self.alone.len() {
            let shape = *self.alone[layer].shape();
            let rows = RowLayout::token_major(tokens, &shape);
            let [keys, values] = [(); 2].map(|()| self.rows(tokens * shape.kv_heads() * 64));
            block_on(self.model.store_prompt(layer, rows, &keys, &values, &prompt)).unwrap();
            block_on(self.alone[layer].prefill(sequence, rows, &keys, &values, &prompt)).unwrap();
        }
        self.model.commit().unwrap();
    }

    fn append(&mut self, tokens: &[usize; SEQUENCES], abandoned: bool) {
        let run = |(sequence, &tokens)| match tokens {
            0 => None,
            1 => Some(TokenRun::decode(sequence)),
            _ => Some(TokenRun::chunk(sequence, tokens)),
        };
        let runs: Vec<TokenRun> = tokens.iter().enumerate().filter_map(run).collect();
        let count: usize = tokens.iter().sum();
        if runs.is_empty() {
            return;
        }
        block_on(self.model.reserve_for_append(&runs)).unwrap();
        let held = self.model.memory().in_use_bytes();
        self.model.begin_append(&runs).unwrap();
        for layer in 0..self.alone.len() {
            let shape = *self.alone[layer].shape();
            let row = shape.kv_heads() * 64;
            let rows = RowLayout::token_major(count, &shape);
            let [keys, values] = [(); 2].map(|()| self.rows(count * row));
            let queries = self.rows(count * shape.query_heads() * 64);
            block_on(self.model.store(layer, rows, &keys, &values)).unwrap();
            let output = block_on(self.model.attend(layer, &queries, ElementType::F32)).unwrap();
            if !abandoned {
                self.append_alone(layer, &runs, [&keys, &values]);
                let queries_of = |run: &TokenRun| match run.tokens() {
                    1 => QueryRun::decode(run.sequence()),
                    tokens => QueryRun::causal(run.sequence(), tokens),
                };
                let runs: Vec<QueryRun> = runs.iter().map(queries_of).collect();
                let expected = block_on(self.alone[layer].attend_runs(&runs, &queries, ElementType::F32)).unwrap();
                assert_close(&output.to_f32(), &expected.to_f32(), layer);
            }
        }
        if abandoned {
            self.model.abandon();
            assert_eq!(self.model.memory().in_use_bytes(), held);
            return;
        }
        self.model.commit().unwrap();
        for run in runs.iter().filter(|run| run.tokens() > 1) {
            block_on(self.model.pack_windows(run.sequence())).unwrap();
            self.alone.iter_mut().for_each(|cache| block_on(cache.pack_windows(run.sequence())).unwrap());
        }
    }

    /// The runs of a step, one call after the other.
    fn append_alone(&mut self, layer: usize, runs: &[TokenRun], dense: [&CpuTensor; 2]) {
        let cache = &mut self.alone[layer];
        let row = cache.shape().kv_heads() * 64;
        let mut first = 0;
        for run in runs {
            let of = |tensor: &CpuTensor| {
                CpuTensor::F32(tensor.to_f32()[first * row..(first + run.tokens()) * row].to_vec())
            };
            let (keys, values) = (of(dense[0]), of(dense[1]));
            let rows = RowLayout::token_major(run.tokens(), cache.shape());
            match run.tokens() {
                1 => block_on(cache.append_to(&[run.sequence()], rows, &keys, &values)).unwrap(),
                _ => block_on(cache.extend(run.sequence(), rows, &keys, &values)).unwrap(),
            }
            first += run.tokens();
        }
    }

    fn compare(&self) {
        for (layer, alone) in self.alone.iter().enumerate() {
            for sequence in 0..SEQUENCES {
                let rows = |spans: Vec<kvpack::cache::StoredSpan<CpuTensor>>| -> Vec<_> {
                    let of = |span: &kvpack::cache::StoredSpan<CpuTensor>| {
                        (span.tokens, span.store, span.keys.to_f32(), span.values.to_f32())
                    };
                    spans.iter().map(of).collect()
                };
                let (together, apart) = (self.model.dequantize(layer, sequence), alone.dequantize(sequence));
                assert!(rows(together.unwrap()) == rows(apart.unwrap()), "layer {layer}, sequence {sequence}");
                assert_eq!(self.model.tokens(layer, sequence), alone.tokens(sequence));
                assert_eq!(self.model.length(sequence), alone.length(sequence));
            }
        }
        let alone: u64 = self.alone.iter().map(|cache| cache.memory().in_use_bytes()).sum();
        assert_eq!(self.model.memory().in_use_bytes(), alone);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn layers_together_hold_what_they_hold_alone(operations in operations(), seed in any::<u64>()) {
        let mut both = Both::new(seed);
        for operation in &operations {
            both.apply(operation);
            both.compare();
        }
    }
}

/// A CPU whose n-th step fails after it was written.
#[derive(Clone, Default)]
struct Failing(Cpu, std::rc::Rc<Cell<usize>>);

impl Forward for Failing {
    type Inner = Cpu;

    fn inner(&self) -> &Cpu {
        &self.0
    }

    fn write_step(
        &self,
        stores: &mut [&mut CpuStore],
        input: Option<WriteInput<'_, CpuTensor, NonFiniteFlags>>,
        table: &WriteTable,
    ) -> Result<()> {
        self.1.set(self.1.get().wrapping_sub(1));
        self.0.write_step(stores, input, table)?;
        if self.1.get() == 0 {
            return Err(Error::OutOfMemory { what: "a test", bytes: 1, message: "as ordered".into() });
        }
        Ok(())
    }
}

/// One decode step of one sequence.
fn step<B: Backend<Tensor = CpuTensor>>(cache: &mut ModelCache<B>, value: f32) -> Result<()> {
    cache.begin_append(&[TokenRun::decode(0)])?;
    for layer in 0..cache.layers() {
        let shape = *cache.shape(layer)?;
        let row = CpuTensor::F32(vec![value; shape.kv_heads() * 64]);
        block_on(cache.store(layer, RowLayout::token_major(1, &shape), &row, &row))?;
    }
    cache.commit()
}

/// Layers of a kind share flags, and are told by their number in the model.
#[test]
fn what_could_not_be_stored_is_told_by_layer() {
    let mut cache = ModelCache::new(&Cpu::new(), &layers(), 1).unwrap();
    block_on(cache.reserve_for_append(&[TokenRun::decode(0)])).unwrap();
    cache.begin_append(&[TokenRun::decode(0)]).unwrap();
    for layer in 0..cache.layers() {
        let row = |value| CpuTensor::F32(vec![value; cache.shape(layer).unwrap().kv_heads() * 64]);
        let (sound, bad) = (row(0.5), row(f32::NAN));
        let values = if layer == 2 || layer == 4 { &bad } else { &sound };
        let rows = RowLayout::token_major(1, cache.shape(layer).unwrap());
        block_on(cache.store(layer, rows, &sound, values)).unwrap();
    }
    cache.commit().unwrap();
    let told = |layer| FlaggedToken { layer, tensor: KeyOrValue::Value, token: 0 };
    assert_eq!(block_on(cache.non_finite()).unwrap(), [told(2), told(4)]);
    cache.clear_non_finite().unwrap();
    assert_eq!(block_on(cache.non_finite()).unwrap(), []);
}

#[test]
fn a_failure_in_a_late_layer_leaves_none_ahead() {
    let backend = Forwarding(Failing::default());
    let mut cache = ModelCache::new(&backend, &layers(), 1).unwrap();
    // A window is full with the next token but one.
    for token in 0..127 + 40 {
        block_on(cache.reserve_for_append(&[TokenRun::decode(0)])).unwrap();
        step(&mut cache, token as f32).unwrap();
    }
    let state = |cache: &ModelCache<Forwarding<Failing>>| {
        let rows = (0..cache.layers()).map(|layer| {
            let spans = cache.dequantize(layer, 0).unwrap();
            spans.iter().map(|span| (span.store, span.keys.to_f32(), span.values.to_f32())).collect::<Vec<_>>()
        });
        (rows.collect::<Vec<_>>(), cache.memory().in_use_bytes(), cache.length(0))
    };
    block_on(cache.reserve_for_append(&[TokenRun::decode(0)])).unwrap();
    let before = state(&cache);
    for failing in 1..=cache.layers() {
        backend.0.1.set(failing);
        let failed = step(&mut cache, 0.5);
        assert!(matches!(failed, Err(Error::OutOfMemory { .. })), "{failed:?}");
        assert!(cache.begin_append(&[TokenRun::decode(0)]).is_err(), "the step is still open");
        cache.abandon();
        assert!(state(&cache) == before, "after a failure in layer {}", failing - 1);
    }
    backend.0.1.set(0);
    step(&mut cache, 0.5).unwrap();
    assert_eq!(cache.length(0), Ok(127 + 41));
    assert!(cache.memory().packed().last().is_some_and(|store| store.tokens > 0), "the windows were packed");
}

#[test]
fn a_step_is_opened_filled_and_closed_in_order() {
    let mut cache = ModelCache::new(&Cpu::new(), &layers(), 2).unwrap();
    let shape = *cache.shape(0).unwrap();
    let rows = RowLayout::token_major(1, &shape);
    let row = CpuTensor::F32(vec![0.5; 128]);
    let query = CpuTensor::F32(vec![0.5; 256]);
    let is_refused = |result: Result<()>| assert!(matches!(result, Err(Error::Plan { .. })), "{result:?}");
    is_refused(ModelCache::new(&Cpu::new(), &[], 1).map(drop));
    is_refused(cache.commit());
    is_refused(block_on(cache.store(0, rows, &row, &row)));
    is_refused(cache.begin_append(&[TokenRun::decode(0), TokenRun::decode(0)]));
    assert!(matches!(cache.begin_append(&[TokenRun::decode(2)]), Err(Error::Sequence { .. })));
    assert!(matches!(cache.begin_append(&[TokenRun::chunk(0, 0)]), Err(Error::NoTokens { .. })));
    // Nothing is allocated within a step.
    assert!(matches!(cache.begin_append(&[TokenRun::decode(0)]), Err(Error::NoRoom { .. })));
    assert_eq!(cache.memory().allocated_bytes(), 0);
    block_on(cache.reserve_for_append(&[TokenRun::decode(0)])).unwrap();
    cache.begin_append(&[TokenRun::decode(0)]).unwrap();
    for refused in [cache.fork(0, 1), cache.clear(0), cache.truncate(0, 0), block_on(cache.pack_windows(0))] {
        is_refused(refused);
    }
    is_refused(block_on(cache.attend(0, &query, ElementType::F32)).map(drop));
    is_refused(block_on(cache.store(9, rows, &row, &row)));
    is_refused(block_on(cache.store(0, RowLayout::token_major(2, &shape), &query, &query)));
    is_refused(block_on(cache.store_prompt(0, rows, &row, &row, &[])));
    block_on(cache.store(0, rows, &row, &row)).unwrap();
    is_refused(cache.commit());
    cache.abandon();
    assert_eq!((cache.length(0), cache.memory().in_use_bytes()), (Ok(0), 0));
    // More tokens than numbers count are refused like any that do not fit.
    block_on(cache.reserve_for_append(&[TokenRun::decode(0)])).unwrap();
    step(&mut cache, 0.5).unwrap();
    let endless = [TokenRun::chunk(0, usize::MAX), TokenRun::chunk(1, usize::MAX)];
    assert!(matches!(cache.begin_append(&endless), Err(Error::Limit { .. })));
    cache.clear(0).unwrap();
    // A prompt's spans are those that its step was opened with.
    let span = |tokens| [PromptSpan::packed(TokenRange::new(0, tokens).unwrap())];
    block_on(cache.reserve_for_prefill(&span(1))).unwrap();
    cache.begin_prefill(0, 1, &span(1)).unwrap();
    is_refused(block_on(cache.store_prompt(0, rows, &row, &row, &[])));
    block_on(cache.store_prompt(0, rows, &row, &row, &span(1))).unwrap();
    cache.abandon();
    // As many tokens for the same store, but others.
    let halves = [0, 1].map(|start| PromptSpan::f16(TokenRange::new(start, start + 1).unwrap()));
    let turned = [1, 0].map(|at| halves[at]);
    let two = RowLayout::token_major(2, &shape);
    let rows = CpuTensor::F32(vec![0.5; 2 * shape.kv_heads() * shape.head_dim()]);
    block_on(cache.reserve_for_prefill(&halves)).unwrap();
    cache.begin_prefill(0, 2, &halves).unwrap();
    is_refused(block_on(cache.store_prompt(0, two, &rows, &rows, &turned)));
    block_on(cache.store_prompt(0, two, &rows, &rows, &halves)).unwrap();
    cache.abandon();
    assert_eq!(cache.memory().in_use_bytes(), 0);
}

/// Room that is reserved once is one shard, and a step that does not fit changes nothing.
#[test]
fn a_budget_is_one_shard_and_is_kept() {
    let shape = AttentionShape::new(4, 2, 64).unwrap();
    let recipe = Recipe::calibquant(Bits::Two).with_window(0);
    let mut cache = ModelCache::new(&Cpu::new(), &vec![(shape, recipe); 3], 2).unwrap();
    let room = [(40, 0), (2, 2), (2, 0)].map(|(pages, spans)| StoreRoom { pages, spans });
    block_on(cache.reserve(&room)).unwrap();
    let free = cache.free_room(0).unwrap();
    assert!(
        free.iter().zip(&room).all(|(free, room)| free.pages >= room.pages && free.spans >= room.spans),
        "{free:?}"
    );
    let allocated = cache.memory().allocated_bytes();
    let mut tokens = 0;
    let refused = loop {
        if let Err(error) = step(&mut cache, tokens as f32) {
            break error;
        }
        tokens += 1;
    };
    assert!(matches!(refused, Error::NoRoom { what: "pages", needed: 1, free: 0, .. }), "{refused}");
    // The tile that has no room is not packed, and its last token is not stored.
    assert_eq!((tokens + 1) % 128, 0, "{tokens} tokens");
    assert_eq!((cache.length(0), cache.memory().allocated_bytes()), (Ok(tokens), allocated));
    let needed = cache.room_for_append(0, &[TokenRun::decode(0)]).unwrap();
    assert!(needed[2].pages > cache.free_room(0).unwrap()[2].pages, "{needed:?}");
    let plan = {
        cache.truncate(0, tokens - 1).unwrap();
        cache.begin_append(&[TokenRun::decode(0)]).unwrap();
        cache.plan(0)
    };
    assert!(plan.unwrap().segments().iter().flat_map(|segment| segment.pages()).all(|page| page.shard == 0));
    cache.abandon();
}

/// What a sequence holds in every layer, by span: its store, keys and values.
type Held = Vec<Vec<(StoreId, Vec<f32>, Vec<f32>)>>;

fn held<B: Backend<Tensor = CpuTensor>>(cache: &ModelCache<B>, sequence: usize) -> Held {
    let of_layer = |layer| {
        let spans = cache.dequantize(layer, sequence).unwrap();
        spans.iter().map(|span| (span.store, span.keys.to_f32(), span.values.to_f32())).collect()
    };
    (0..cache.layers()).map(of_layer).collect()
}

/// A sequence gives all its memory back while it waits on the host, and comes back bit for bit, to another place too.
/// Where it finds no room, nothing changes.
#[test]
fn a_sequence_waits_on_the_host() {
    let cpu = Cpu::new().with_memory_limit(1 << 22);
    let mut cache = ModelCache::new(&cpu, &layers(), 2).unwrap();
    for token in 0..300 {
        block_on(cache.reserve_for_append(&[TokenRun::decode(0)])).unwrap();
        step(&mut cache, (token as f32 * 0.7).sin()).unwrap();
    }
    let (before, memory) = (held(&cache, 0), cache.memory().in_use_bytes());
    let swapped = block_on(cache.swap_out(0)).unwrap();
    assert_eq!((cache.length(0), cache.memory().in_use_bytes(), swapped.length()), (Ok(0), 0, 300));
    assert_eq!(swapped.bytes() as u64, memory);
    block_on(cache.swap_in(1, &swapped)).unwrap();
    assert_eq!((held(&cache, 1), cache.length(1), cache.memory().in_use_bytes()), (before.clone(), Ok(300), memory));
    assert!(matches!(block_on(cache.swap_in(1, &swapped)), Err(Error::Plan { .. })), "it holds tokens");

    // The same again beside it, until memory is spent.
    let mut most = ModelCache::new(&Cpu::new().with_memory_limit(memory - 1), &layers(), 2).unwrap();
    assert!(matches!(block_on(most.swap_in(0, &swapped)), Err(Error::OutOfMemory { .. })));
    assert_eq!((most.length(0), most.memory().in_use_bytes()), (Ok(0), 0));
    let mut others = ModelCache::new(&cpu, &layers()[..2], 1).unwrap();
    assert!(matches!(block_on(others.swap_in(0, &swapped)), Err(Error::Plan { .. })), "of other layers");
    let mut other_recipe = layers();
    other_recipe[0].1 = other_recipe[0].1.clone().with_sink(128);
    let mut others = ModelCache::new(&cpu, &other_recipe, 1).unwrap();
    assert!(matches!(block_on(others.swap_in(0, &swapped)), Err(Error::Plan { .. })), "of another recipe");
    // And decoding goes on where it was.
    block_on(cache.swap_in(0, &swapped)).unwrap();
    block_on(cache.reserve_for_append(&[TokenRun::decode(0)])).unwrap();
    step(&mut cache, 0.5).unwrap();
    assert_eq!((cache.length(0), cache.length(1)), (Ok(301), Ok(300)));
}

/// A step that stores nothing could never be committed.
#[test]
fn a_prompt_of_nothing_opens_no_step() {
    let mut cache = ModelCache::new(&Cpu::new(), &layers(), SEQUENCES).unwrap();
    assert!(matches!(cache.begin_prefill(0, 0, &[]), Err(Error::NoTokens { .. })));
    let run = [TokenRun::decode(0)];
    block_on(cache.reserve_for_append(&run)).unwrap();
    cache.begin_append(&run).unwrap();
    cache.abandon();
}

/// Handing a step out encodes nothing: it is committed only once every layer has stored its tokens.
#[test]
fn a_step_that_was_only_handed_out_is_not_committed() {
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    let mut cache = ModelCache::new(&Cpu::new(), &vec![(shape, Recipe::f16()); 3], 1).unwrap();
    block_on(cache.reserve_for_append(&[TokenRun::decode(0)])).unwrap();
    cache.begin_append(&[TokenRun::decode(0)]).unwrap();
    assert_eq!(cache.open_steps().unwrap()[0].layers, [0, 1, 2]);
    assert!(matches!(cache.commit(), Err(Error::Plan { what: "commit", .. })));
    [0, 2].into_iter().for_each(|layer| cache.open_steps().unwrap()[0].stored.mark(layer));
    let reason = cache.commit().unwrap_err().to_string();
    assert!(reason.contains("layer 1 has not stored"), "{reason}");
    cache.open_steps().unwrap()[0].stored.mark(1);
    cache.commit().unwrap();
    assert_eq!(cache.length(0), Ok(1));
}
