//! Failing devices: every failed call leaves a cache as it was.

use std::cell::Cell;

use kvpack::backend::{
    AttendOptions, Attention, Backend, Forward, Forwarding, NonFinite, Packing, SpanWrite, Storage, WriteInput,
};
use kvpack::cache::{KvCache, PromptSpan, Recipe, StoreId};
use kvpack::cpu::{Cpu, CpuIndices, CpuStore, CpuTensor, NonFiniteFlags};
use kvpack::format::{AffineFormat, Grouping, KeyOrValue, TensorFormat};
use kvpack::plan::{AttendPlan, ElementType, QueryRun, RowLayout, TokenRange, WriteTable};
use kvpack::{AttentionShape, Bits, Error, Result, SegmentFormat};
use pollster::block_on;

/// A CPU whose n-th changing call fails.
#[derive(Clone, Default)]
struct Failing {
    cpu: Cpu,
    calls_left: std::rc::Rc<Cell<Option<usize>>>,
}

impl Failing {
    fn call(&self) -> Result<()> {
        match self.calls_left.get() {
            Some(0) => Err(Error::OutOfMemory { what: "a test", bytes: 1, message: "as ordered".into() }),
            Some(n) => {
                self.calls_left.set(Some(n - 1));
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Forward for Failing {
    type Inner = Cpu;

    fn inner(&self) -> &Cpu {
        &self.cpu
    }

    fn max_shard_pages(&self, _: &AttentionShape, _: &SegmentFormat) -> u32 {
        1
    }

    async fn add_shard(&self, store: &mut CpuStore, pages: u32) -> Result<()> {
        self.call()?;
        self.cpu.add_shard(store, pages).await
    }

    async fn reserve_ranges(&self, store: &mut CpuStore, slots: usize) -> Result<()> {
        self.call()?;
        self.cpu.reserve_ranges(store, slots).await
    }

    async fn first_non_finite(
        &self,
        which: KeyOrValue,
        tensor: &CpuTensor,
        rows: &RowLayout,
        shape: &AttentionShape,
        largest: f32,
    ) -> Result<Option<NonFinite>> {
        self.call()?;
        self.cpu.first_non_finite(which, tensor, rows, shape, largest).await
    }

    fn quantize(
        &self,
        store: &mut CpuStore,
        keys: &CpuTensor,
        values: &CpuTensor,
        write: SpanWrite<'_, CpuIndices>,
    ) -> Result<()> {
        self.call()?;
        self.cpu.quantize(store, keys, values, write)
    }

    /// It fails before anything is written, or after all of it is.
    fn write_step(
        &self,
        stores: &mut [&mut CpuStore],
        input: Option<WriteInput<'_, CpuTensor, NonFiniteFlags>>,
        table: &WriteTable,
    ) -> Result<()> {
        self.call()?;
        self.cpu.write_step(stores, input, table)?;
        self.call()
    }

    async fn attend(
        &self,
        plan: &AttendPlan,
        stores: &[&CpuStore],
        queries: &CpuTensor,
        options: AttendOptions,
    ) -> Result<CpuTensor> {
        self.call()?;
        self.cpu.attend(plan, stores, queries, options).await
    }
}

fn wave(elements: usize) -> CpuTensor {
    CpuTensor::F32((0..elements).map(|i| (i as f32 * 0.37).sin()).collect())
}

fn shape() -> AttentionShape {
    AttentionShape::new(2, 1, 64).unwrap()
}

/// A cache with 127 decoded tokens in each of two sequences: the next token fills both windows.
fn filled<B: Backend<Tensor = CpuTensor>>(backend: B, recipe: Recipe) -> KvCache<B> {
    let mut cache = KvCache::new(backend, shape(), 2, recipe).unwrap();
    for _ in 0..127 {
        block_on(cache.append(RowLayout::token_major(2, &shape()), &wave(128), &wave(128))).unwrap();
    }
    cache
}

fn outputs<B: Backend<Tensor = CpuTensor>>(cache: &KvCache<B>) -> Vec<f32> {
    block_on(cache.attend(&wave(2 * 128), ElementType::F32)).unwrap().to_f32()
}

#[test]
fn a_failure_anywhere_changes_nothing() {
    let token = TensorFormat::Affine(AffineFormat::new(Bits::Four, Grouping::Token));
    let per_token = Recipe::pack_all(SegmentFormat { key: token, value: token });
    // A token that is packed as it arrives needs no window to be packed.
    for (recipe, least_calls) in [
        (Recipe::pack_all(SegmentFormat::per_channel(Bits::Two)), 4),
        (per_token.clone().with_window(0), 4),
        (per_token, 2),
    ] {
        for prefill in [false, true] {
            let mut failures = 0;
            loop {
                let failing = Failing::default();
                let mut cache = filled(Forwarding(failing.clone()), recipe.clone());
                let (before, memory) = (outputs(&cache), cache.memory());
                failing.calls_left.set(Some(failures));
                let result = if prefill {
                    let spans = [(0, 100, StoreId::F16), (100, 300, StoreId::PACKED), (300, 301, StoreId::F16)]
                        .map(|(start, end, store)| PromptSpan::run(TokenRange::new(start, end).unwrap(), store));
                    let rows = RowLayout::token_major(301, &shape());
                    block_on(cache.prefill(1, rows, &wave(301 * 64), &wave(301 * 64), &spans))
                } else {
                    block_on(cache.append(RowLayout::token_major(2, &shape()), &wave(128), &wave(128)))
                };
                failing.calls_left.set(None);
                if result.is_ok() {
                    break;
                }
                failures += 1;
                assert_eq!(outputs(&cache), before);
                let after = cache.memory();
                assert_eq!((cache.tokens(0), cache.tokens(1)), (Ok(127), Ok(127)));
                assert_eq!(after.in_use_bytes(), memory.in_use_bytes());
                let packed: usize = after.packed().iter().map(|store| store.pages_in_use).sum();
                assert_eq!(after.f16().pages_in_use + packed, 2);
                // And the same call succeeds afterwards.
                block_on(cache.append(RowLayout::token_major(2, &shape()), &wave(128), &wave(128))).unwrap();
                let packed: usize = cache.memory().packed().iter().map(|store| store.tokens).sum();
                assert_eq!((cache.memory().f16().tokens, packed), (0, 256));
            }
            assert!(failures >= least_calls, "{failures} calls could fail");
        }
    }
}

#[test]
fn a_cache_larger_than_the_device_is_a_typed_error() {
    let page = SegmentFormat::F16.page_bytes(&shape()) as u64;
    let mut cache = KvCache::new(Cpu::new().with_memory_limit(3 * page), shape(), 1, Recipe::f16()).unwrap();
    let prompt = |tokens| [PromptSpan::f16(TokenRange::new(0, tokens).unwrap())];
    let rows = |tokens| RowLayout::token_major(tokens, &shape());
    block_on(cache.prefill(0, rows(200), &wave(200 * 64), &wave(200 * 64), &prompt(200))).unwrap();
    let before = cache.memory();
    let error = block_on(cache.prefill(0, rows(300), &wave(300 * 64), &wave(300 * 64), &prompt(300))).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    assert_eq!(cache.memory(), before);
    assert_eq!(cache.tokens(0), Ok(200));
    // Two pages of three are in use: one more fits, although doubling does not.
    block_on(cache.prefill(0, rows(100), &wave(100 * 64), &wave(100 * 64), &prompt(100))).unwrap();
    assert_eq!(cache.memory().allocated_bytes(), 3 * page);
    // Dropping the cache gives its memory back.
    let cpu = cache.backend().clone();
    assert!(block_on(cpu.add_shard(&mut cpu.create_store(shape(), SegmentFormat::F16).unwrap(), 1)).is_err());
    drop(cache);
    assert!(block_on(cpu.add_shard(&mut cpu.create_store(shape(), SegmentFormat::F16).unwrap(), 3)).is_ok());
}

#[test]
fn a_cache_larger_than_a_binding_is_spread_over_several() {
    let page = SegmentFormat::F16.tensor_page_bytes(KeyOrValue::Key, &shape()) as u64;
    let store = |max_bytes| {
        let mut cache = KvCache::new(Cpu::new().with_max_shard_bytes(max_bytes), shape(), 1, Recipe::f16()).unwrap();
        let rows = RowLayout::token_major(1000, &shape());
        let prompt = [PromptSpan::f16(TokenRange::new(0, 1000).unwrap())];
        block_on(cache.prefill(0, rows, &wave(64_000), &wave(64_000), &prompt)).map(|()| cache)
    };
    let query = wave(128);
    let whole = store(1 << 30).unwrap();
    let spread = store(3 * page).unwrap();
    let shards = |cache: &KvCache<Cpu>| {
        cache.plan(&[QueryRun::decode(0)]).unwrap().segments()[0]
            .pages()
            .iter()
            .map(|page| page.shard)
            .max()
            .map_or(0, |shard| shard + 1)
    };
    assert_eq!((shards(&whole), shards(&spread)), (1, 3));
    let output = |cache: &KvCache<Cpu>| block_on(cache.attend(&query, ElementType::F32)).unwrap().to_f32();
    approx::assert_abs_diff_eq!(output(&whole).as_slice(), output(&spread).as_slice(), epsilon = 1e-6);
    assert!(matches!(store(page - 1), Err(Error::Limit { .. })));
}

#[test]
fn room_that_was_reserved_is_used() {
    let recipe = Recipe::calibquant(Bits::One);
    let mut cache = KvCache::new(Cpu::new(), shape(), 1, recipe).unwrap();
    assert_eq!(cache.memory().allocated_bytes(), 0);
    block_on(cache.reserve(StoreId::PACKED, 2000)).unwrap();
    let reserved = cache.memory();
    assert_eq!((reserved.f16().allocated_bytes, reserved.packed()[0].pages), (0, 16));
    let rows = RowLayout::token_major(2000, &shape());
    let prompt = [PromptSpan::packed(TokenRange::new(0, 2000).unwrap())];
    block_on(cache.prefill(0, rows, &wave(128_000), &wave(128_000), &prompt)).unwrap();
    let memory = cache.memory();
    assert_eq!(memory.allocated_bytes(), reserved.allocated_bytes());
    // 16 pages of 1-bit codes and one slot of ranges.
    assert_eq!(memory.in_use_bytes(), 16 * 2 * 128 * 64 / 8 + 2 * 64 * 8);
    assert!((memory.bits_per_element() - 1.056).abs() < 1e-3, "{}", memory.bits_per_element());
    cache.clear(0).unwrap();
    assert_eq!(cache.memory().in_use_bytes(), 0);
}

#[test]
fn outputs_can_be_f16() {
    let cache = filled(Cpu::new(), Recipe::calibquant(Bits::One));
    let half = block_on(cache.attend(&wave(256), ElementType::F16)).unwrap();
    assert!(matches!(half, CpuTensor::F16(_)));
    approx::assert_abs_diff_eq!(half.to_f32().as_slice(), outputs(&cache).as_slice(), epsilon = 1e-3);
}

#[test]
fn wrong_caches_are_refused() {
    assert!(matches!(AttentionShape::new(5, 2, 64), Err(Error::HeadCounts { .. })));
    assert!(matches!(AttentionShape::new(4, 2, 72), Err(Error::HeadDim { given: 72 })));
    let none = KvCache::new(Cpu::new(), shape(), 0, Recipe::f16());
    assert!(matches!(none, Err(Error::Plan { .. })));
    let channels = TensorFormat::Affine(AffineFormat::new(Bits::Two, Grouping::TokenChannels(48)));
    let recipe = Recipe::pack_all(SegmentFormat { key: channels, value: channels });
    assert!(matches!(KvCache::new(Cpu::new(), shape(), 1, recipe), Err(Error::Format { .. })));
    let empty = KvCache::new(Cpu::new(), shape(), 1, Recipe::f16()).unwrap();
    let nothing = block_on(empty.attend(&wave(128), ElementType::F32)).unwrap();
    assert_eq!(nothing.to_f32(), [0.0; 128], "a sequence without tokens");
}

/// A fork shares every page; the first to append copies the open one, and a failure on the way leaves
/// both as they were.
#[test]
fn a_failed_append_to_a_shared_page_changes_nothing() {
    let failing = Failing::default();
    let mut cache = filled(Forwarding(failing.clone()), Recipe::f16());
    assert!(matches!(cache.fork(0, 1), Err(Error::Plan { .. })), "sequence 1 holds tokens");
    cache.clear(1).unwrap();
    cache.fork(0, 1).unwrap();
    let (before, memory) = (outputs(&cache), cache.memory());
    assert_eq!(memory.f16().pages_in_use, 1);
    let append = |cache: &mut KvCache<Forwarding<Failing>>, sequence| {
        let rows = RowLayout::token_major(1, &shape());
        let token = CpuTensor::F32(vec![0.5; 64]);
        block_on(cache.append_to(&[sequence], rows, &token, &token))
    };
    let mut failures = 0;
    loop {
        failing.calls_left.set(Some(failures));
        let result = append(&mut cache, 1);
        failing.calls_left.set(None);
        if result.is_ok() {
            break;
        }
        failures += 1;
        assert_eq!((outputs(&cache), cache.memory().f16().pages_in_use), (before.clone(), 1));
    }
    // The step, before and after it is written.
    assert!(failures >= 2, "{failures} calls could fail");
    assert_eq!((cache.tokens(0), cache.tokens(1), cache.memory().f16().pages_in_use), (Ok(127), Ok(128), 2));
    let head = 2 * 64;
    assert_eq!(outputs(&cache)[..head], before[..head]);
    assert_ne!(outputs(&cache)[head..], before[head..]);
    // The other sequence holds its page alone by now, and writes to it.
    append(&mut cache, 0).unwrap();
    assert_eq!(cache.memory().f16().pages_in_use, 2);
    cache.truncate(1, 0).unwrap();
    assert_eq!((cache.tokens(1), cache.memory().f16().pages_in_use), (Ok(0), 1));
}
