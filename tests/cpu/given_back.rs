//! What forgetting, swapping, centres and chunks must give back or keep: each test fails on one planted mistake.

use std::cell::Cell;
use std::rc::Rc;

use kvpack::backend::{Forward, Forwarding, SpanBytes, SpanPlace, TokenWrite};
use kvpack::cache::{ChunkStores, KvCache, ModelCache, PromptSpan, Recipe, StoreId};
use kvpack::cpu::{Cpu, CpuStore, CpuTensor, append};
use kvpack::format::{AffineFormat, Grouping, KeyOrValue, TensorFormat};
use kvpack::plan::{Page, RowLayout, StoreCapacity, TokenRange, WriteLayout};
use kvpack::{AttentionShape, Bits, Error, Result, SegmentFormat};
use pollster::block_on;

use any_backend::cache_model::dropped::{Waiting, polled};
use any_backend::random_rows::Random;

fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

fn range(start: usize, end: usize) -> TokenRange {
    TokenRange::new(start, end).unwrap()
}

/// Rows of some tokens, about a bias.
fn rows(tokens: usize, seed: u64) -> (RowLayout, CpuTensor) {
    let mut random = Random::new(seed);
    let rows = (0..tokens * 128).map(|i| 3.0 + (i % 5) as f32 + random.normal()).collect();
    (RowLayout::token_major(tokens, &shape()), CpuTensor::F32(rows))
}

/// A span that ends with the range goes whole: its last page, which is not full, and its range slot too.
#[test]
fn forgotten_spans_give_back_their_last_page_and_their_slot() {
    let mut cache = KvCache::new(Cpu::new(), shape(), 1, Recipe::calibquant(Bits::Two)).unwrap();
    let (layout, tensor) = rows(200, 1);
    let mut allocated = None;
    for round in 0..40 {
        let spans = [PromptSpan::packed(range(0, 200))];
        block_on(cache.prefill(0, layout, &tensor, &tensor, &spans)).unwrap();
        cache.forget(0, range(200 * round, 200 * (round + 1))).unwrap();
        let memory = cache.memory();
        assert_eq!(memory.in_use_bytes(), 0, "round {round}");
        assert_eq!(memory.allocated_bytes(), *allocated.get_or_insert(memory.allocated_bytes()), "round {round}");
    }
    assert_eq!((cache.length(0), cache.tokens(0)), (Ok(8000), Ok(0)));
}

/// Tokens that came since something was evicted between them and the others.
#[test]
fn appended_tokens_are_those_behind_the_last_gap() {
    let recipe = Recipe::pack_all(SegmentFormat::saw_int4());
    let mut cache = ModelCache::new(&Cpu::new(), &[(shape(), recipe)], 1).unwrap();
    let (layout, tensor) = rows(300, 2);
    let spans = [PromptSpan::f16(range(0, 128)), PromptSpan::packed(range(128, 256)), PromptSpan::f16(range(256, 300))];
    block_on(cache.reserve_for_prefill(&spans)).unwrap();
    cache.begin_prefill(0, 300, &spans).unwrap();
    block_on(cache.store_prompt(0, layout, &tensor, &tensor, &spans)).unwrap();
    cache.commit().unwrap();
    assert_eq!(cache.appended(0), Ok(300));
    cache.forget(0, range(128, 256)).unwrap();
    assert_eq!((cache.appended(0), cache.length(0)), (Ok(44), Ok(300)));
}

/// The CPU, whose writes of spans fail while that is ordered.
#[derive(Clone)]
struct Failing {
    cpu: Cpu,
    fails: Rc<Cell<bool>>,
}

impl Forward for Failing {
    type Inner = Cpu;

    fn inner(&self) -> &Cpu {
        &self.cpu
    }

    fn write_span(&self, store: &mut CpuStore, bytes: &SpanBytes, place: SpanPlace<'_>) -> Result<()> {
        if self.fails.get() {
            return Err(Error::OutOfMemory { what: "a test", bytes: 1, message: "as ordered".into() });
        }
        kvpack::backend::Storage::write_span(&self.cpu, store, bytes, place)
    }
}

/// A sequence that cannot come back takes nothing with it: afterwards every sequence still gets a centre.
#[test]
fn a_failed_swap_in_gives_its_centre_back() {
    let fails = Rc::new(Cell::new(false));
    let backend = Forwarding(Failing { cpu: Cpu::new(), fails: fails.clone() });
    let recipe = Recipe::pack_all(SegmentFormat::saw_int4()).with_centre();
    let mut cache = KvCache::new(backend, shape(), 2, recipe).unwrap();
    let (layout, tensor) = rows(150, 3);
    block_on(cache.extend(0, layout, &tensor, &tensor)).unwrap();
    let before = cache.dequantize(0).unwrap();
    let in_use = cache.memory().in_use_bytes();
    let swapped = block_on(cache.swap_out(0)).unwrap();
    fails.set(true);
    for _ in 0..3 {
        assert!(matches!(block_on(cache.swap_in(0, &swapped)), Err(Error::OutOfMemory { .. })));
        assert_eq!(cache.memory().in_use_bytes(), 0);
    }
    fails.set(false);
    block_on(cache.swap_in(0, &swapped)).unwrap();
    assert_eq!(cache.memory().in_use_bytes(), in_use);
    // The other sequence's tokens are as exact as those of the first: they have a centre too.
    block_on(cache.extend(1, layout, &tensor, &tensor)).unwrap();
    let [first, second] = [0, 1].map(|sequence| cache.dequantize(sequence).unwrap());
    let keys = |spans: &[kvpack::cache::StoredSpan<CpuTensor>]| -> Vec<f32> {
        spans.iter().flat_map(|span| span.keys.to_f32()).collect()
    };
    assert_eq!(keys(&first), keys(&before));
    assert_eq!(keys(&second), keys(&before));
}

/// Whatever centre its slot held in the meantime, a sequence has its own again, in every store: in that of f16 too.
#[test]
fn centres_come_back_in_every_store() {
    let recipe = Recipe::pack_all(SegmentFormat::saw_int4()).with_centre().with_sink(128);
    let mut cache = KvCache::new(Cpu::new(), shape(), 2, recipe).unwrap();
    let (layout, tensor) = rows(200, 4);
    block_on(cache.extend(0, layout, &tensor, &tensor)).unwrap();
    let held = |cache: &KvCache<Cpu>| -> Vec<(StoreId, Vec<f32>, Vec<f32>)> {
        let spans = cache.dequantize(0).unwrap();
        spans.iter().map(|span| (span.store, span.keys.to_f32(), span.values.to_f32())).collect()
    };
    let before = held(&cache);
    assert!([StoreId::F16, StoreId::PACKED].iter().all(|store| before.iter().any(|(of, ..)| of == store)));
    let swapped = block_on(cache.swap_out(0)).unwrap();
    // It takes the slot that is free, so that the first sequence comes back to another.
    let (layout, other) = rows(10, 5);
    let other = CpuTensor::F32(other.to_f32().iter().map(|x| 100.0 - x).collect());
    block_on(cache.extend(1, layout, &other, &other)).unwrap();
    block_on(cache.swap_in(0, &swapped)).unwrap();
    assert_eq!(held(&cache), before);
}

/// What is left of a key without its centre may be twice as large as either, so half as much is taken.
#[test]
fn centred_keys_may_be_half_as_large() {
    let four_bits = TensorFormat::Affine(AffineFormat::new(Bits::Four, Grouping::Token));
    let per_token = Recipe::pack_all(SegmentFormat { key: four_bits, value: four_bits });
    for (recipe, largest) in [(Recipe::f16(), 65504.0), (per_token, 32752.0)] {
        let largest: f32 = largest;
        let layout = RowLayout::token_major(1, &shape());
        let row = |x: f32| CpuTensor::F32(vec![x; 128]);
        let values = row(1.0);
        for (recipe, most) in [(recipe.clone(), largest), (recipe.with_centre(), largest / 2.0)] {
            let prefill = |x: f32| {
                let mut cache = KvCache::new(Cpu::new(), shape(), 1, recipe.clone()).unwrap();
                block_on(cache.prefill(0, layout, &row(x), &values, &[PromptSpan::f16(range(0, 1))]))
            };
            assert_eq!(prefill(most), Ok(()));
            let refused = prefill(-most * 1.001);
            assert!(matches!(refused, Err(Error::NotFinite { largest, .. }) if largest == most), "{refused:?}");
        }
    }
    // A kernel that is handed more stores zeros, and a step flags them.
    let mut store = CpuStore::new(shape(), SegmentFormat::F16).unwrap();
    store.add_shard(1).unwrap();
    store.reserve_centres(1).unwrap();
    let (page, layout) = (Page { shard: 0, index: 0 }, RowLayout::token_major(1, &shape()));
    let stored = |store: &mut CpuStore, key: f32| {
        let (keys, values) = ([key; 128], [40000.0; 128]);
        let write = TokenWrite { token: 0, page, slot: 0, centre: Some(0) };
        append(store, (&keys[..]).into(), (&values[..]).into(), layout, &[write]).unwrap();
        let word = |which| store.tile_words(which, page, 0).unwrap().0[0] & 0xffff;
        [word(KeyOrValue::Key), word(KeyOrValue::Value)].map(|half| half::f16::from_bits(half as u16).to_f32())
    };
    assert_eq!(stored(&mut store, 32752.0), [32752.0, 40000.0]);
    assert_eq!(stored(&mut store, 32784.0), [0.0, 40000.0]);
    let capacity = |centre_slots| StoreCapacity {
        format: SegmentFormat::F16,
        shard_pages: vec![1],
        range_slots: 0,
        tokens: 1,
        copies: 0,
        centres: 0,
        centre_slots,
    };
    let layout = WriteLayout::new(shape(), 1, vec![capacity(0), capacity(1)], vec![]).unwrap();
    let largest = |store, which| layout.largest_element(store, which);
    assert_eq!([0, 1].map(|store| largest(store, KeyOrValue::Key)), [65504.0, 32752.0]);
    assert_eq!([0, 1].map(|store| largest(store, KeyOrValue::Value)), [65504.0, 65504.0]);
}

/// A reservation that is dropped wherever it waits: the stores of all layers and the page tables agree afterwards, and
/// nothing is held twice.
#[test]
fn dropped_reservations_leave_the_layers_alike() {
    let recipe = Recipe::calibquant(Bits::Two);
    let (layout, tensor) = rows(300, 8);
    let spans = [PromptSpan::packed(range(0, 200)), PromptSpan::f16(range(200, 300))];
    let mut allocated = None;
    for polls in 0.. {
        let cpu = Cpu::new().with_max_shard_bytes(3 * 128 * 2 * 128);
        let layers = vec![(shape(), recipe.clone()); 2];
        let mut cache = ModelCache::new(&Forwarding(Waiting(cpu)), &layers, 1).unwrap();
        let ended = polled(cache.reserve_for_prefill(&spans), polls).is_some();
        block_on(cache.reserve_for_prefill(&spans)).unwrap();
        cache.begin_prefill(0, 300, &spans).unwrap();
        for layer in 0..2 {
            block_on(cache.store_prompt(layer, layout, &tensor, &tensor, &spans)).unwrap();
        }
        cache.commit().unwrap();
        let bytes = cache.memory().allocated_bytes();
        assert_eq!(bytes, *allocated.get_or_insert(bytes), "dropped after {polls} polls");
        if ended {
            // Shards of two stores and the range slots of one, in two layers.
            assert!(polls > 5, "it waited {polls} times");
            return;
        }
    }
}

/// Gathered spans end with the chunks, so that a sequence can be cut behind them and what remains of the context.
#[test]
fn a_sequence_is_cut_behind_its_chunks() {
    let recipe = Recipe::pack_all(SegmentFormat::saw_int4());
    let mut cache = KvCache::new(Cpu::new(), shape(), 1, recipe).unwrap();
    let (layout, tensor) = rows(110, 6);
    // Three chunks of 32, then 4 tokens of the context, then 10 more.
    let chunks = ChunkStores::new(range(0, 100), 32, vec![StoreId(1), StoreId(0), StoreId(1)]).unwrap();
    let spans = block_on(chunks.upload(&Cpu::new(), 2, 110)).unwrap();
    block_on(cache.prefill(0, layout, &tensor, &tensor, &spans.prompt())).unwrap();
    for length in [98, 96] {
        cache.truncate(0, length).unwrap();
        assert_eq!((cache.length(0), cache.tokens(0)), (Ok(length), Ok(length)));
    }
    assert!(matches!(cache.truncate(0, 95), Err(Error::Plan { .. })));
}
