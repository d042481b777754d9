//! Steps that are bound once and then only encoded, against the twin, bit for bit.

use kvpack::backend::{FlaggedToken, WriteInput};
use kvpack::cpu::{Cpu, CpuStore};
use kvpack::format::{KeyOrValue, TILE_TOKENS};
use kvpack::plan::{ElementType, Elements, LayerWrites, Page, TokenWrite, WriteLayout, WriteTable};
use kvpack::wgpu::{BoundStoreStep, NonFiniteFlags, Store, StoreBuffer, StoreStep, Tensor, Wgpu, WriteMemory};
use kvpack::{AttentionShape, Backend, Bits, Error, SegmentFormat};
use pollster::block_on;
use std::sync::Arc;

use super::words::words;
use crate::gpu_device::{is_brief, shared};
use any_backend::step_writes::{Case, SHARDS, formats, pages};

/// An engine's tensors, which every step overwrites.
struct Engine {
    keys: Tensor,
    values: Tensor,
    flags: NonFiniteFlags,
    memory: WriteMemory,
    step: BoundStoreStep,
}

impl Engine {
    fn new(backend: &Wgpu, case: &Case, stores: &[Store; 2]) -> Self {
        let tensor =
            || Tensor::zeroed(backend.device(), case.rows.elements_needed(&case.shape), case.elements).unwrap();
        let (keys, values) = (tensor(), tensor());
        let flags = NonFiniteFlags::new(backend.device(), 3).unwrap();
        let memory = WriteMemory::new(backend.device(), &case.layout).unwrap();
        let plan = StoreStep::new(&case.layout);
        let kernels = backend.kernels();
        let variants = plan.variants(kernels.storage_buffers(), case.elements, case.elements);
        block_on(kernels.prepare(&variants)).unwrap();
        let input = WriteInput { keys: &keys, values: &values, rows: case.rows, flags: &flags, layer: 2 };
        let step = plan.bind(kernels, &[&stores[0], &stores[1]], &memory, Some(input)).unwrap();
        Self { keys, values, flags, memory, step }
    }
}

/// Writes all steps, one submission each.
fn written(backend: &Wgpu, case: &Case) -> ([Store; 2], Vec<FlaggedToken>) {
    let stores = case.stores(backend);
    let engine = Engine::new(backend, case, &stores);
    let mut table = WriteTable::new(&case.layout);
    for step in &case.steps {
        table.set(&step.writes).unwrap();
        let put = |tensor: &Tensor, elements: Elements<'_>| {
            backend.queue().write_buffer(tensor.buffer(), 0, elements.bytes());
        };
        put(&engine.keys, step.keys.elements());
        put(&engine.values, step.values.elements());
        engine.memory.write(backend.queue(), &table).unwrap();
        let mut encoder = backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        engine.step.encode(&table, &mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default())).unwrap();
        backend.queue().submit([encoder.finish()]);
    }
    let found = block_on(engine.flags.read(backend.device(), backend.queue())).unwrap();
    (stores, found)
}

/// Holds all words of a store against those of the twin.
fn assert_alike(backend: &Wgpu, store: &Store, twin: &CpuStore, case: &Case) {
    assert!(case.centres(backend, store) == case.centres(&Cpu::new(), twin), "centres in {}", case.format);
    for which in [KeyOrValue::Key, KeyOrValue::Value] {
        for shard in 0..SHARDS.len() as u32 {
            let tiles = words(backend, store.shard_buffer(shard, StoreBuffer::tiles(which)).unwrap());
            let ranges = store.shard_buffer(shard, StoreBuffer::ranges(which)).map(|buffer| words(backend, buffer));
            let ranges = ranges.unwrap_or_default();
            for page in pages().filter(|page| page.shard == shard) {
                for head in 0..case.shape.kv_heads() {
                    let tile = page.index as usize * case.shape.kv_heads() + head;
                    let (expected, expected_ranges) = twin.tile_words(which, page, head).unwrap();
                    let found = &tiles[tile * expected.len()..][..expected.len()];
                    assert!(*found == *expected, "{which} {page:?} of {} in {}", store.format(), case.format);
                    let found = &ranges[tile * expected_ranges.len()..][..expected_ranges.len()];
                    assert!(*found == *expected_ranges, "{which} ranges of {page:?} in {}", case.format);
                }
            }
        }
        let slots: Vec<u32> = (0..twin.range_slots())
            .flat_map(|slot| twin.span_ranges(which, slot).unwrap())
            .flat_map(|range| [range.scale.to_bits(), range.min.to_bits()])
            .collect();
        if !slots.is_empty() {
            assert!(
                words(backend, store.span_ranges_buffer(which).unwrap()) == slots,
                "{which} ranges in {}",
                case.format
            );
        }
    }
}

fn check(case: &Case) -> usize {
    let (backend, format) = (shared(), case.format);
    let (expected, expected_found) = case.written(&Cpu::new());
    let (stores, found) = written(&backend, case);
    stores.iter().zip(&expected).for_each(|(store, twin)| assert_alike(&backend, store, twin, case));
    assert_eq!(found, expected_found, "{format}");
    found.len()
}

/// Head dimensions that formats are tried with: the first with all of them, the others with every second one. A run
/// beside another has the first alone.
fn head_dims() -> &'static [usize] {
    if is_brief() { &[64] } else { &[64, 80, 128] }
}

/// Every family of formats, over two shards, with tokens that share words.
#[test]
fn steps_store_what_the_twin_stores() {
    let mut flagged = 0;
    for (i, &head_dim) in head_dims().iter().enumerate() {
        let shape = AttentionShape::new(2, 2, head_dim).unwrap();
        for (j, format) in formats(head_dim).into_iter().enumerate().skip(i % 2).step_by(if i == 0 { 1 } else { 2 }) {
            flagged += check(&Case::new(shape, format, ElementType::ALL[(i + j) % 3], (i * 31 + j) as u64));
        }
    }
    assert!(flagged > 10, "{flagged}");
}

/// The same where keys are stored less centres, which steps make before they store tokens.
#[test]
fn centred_steps_store_what_the_twin_stores() {
    let mut flagged = 0;
    for (i, &head_dim) in head_dims().iter().enumerate() {
        let shape = AttentionShape::new(2, 2, head_dim).unwrap();
        let centred = formats(head_dim).into_iter().filter(|format| format.key.takes_centre()).enumerate();
        for (j, format) in centred.skip(i % 2).step_by(if i == 0 { 1 } else { 2 }) {
            flagged += check(&Case::centred(shape, format, ElementType::ALL[(i + j) % 3], (i * 31 + j) as u64));
        }
    }
    assert!(flagged > 5, "{flagged}");
}

/// The comfortable way stores the same.
#[test]
fn one_call_writes_a_step() {
    let shape = AttentionShape::new(3, 3, 96).unwrap();
    let backend = shared();
    for format in [SegmentFormat::per_channel(Bits::Two), SegmentFormat::saw_int4()] {
        let case = Case::new(shape, format, ElementType::F16, 9);
        let (expected, expected_found) = case.written(&Cpu::new());
        let (stores, found) = case.written(&backend);
        stores.iter().zip(&expected).for_each(|(store, twin)| assert_alike(&backend, store, twin, &case));
        assert_eq!(found, expected_found);
    }
}

/// What the layout does not have is refused when it is bound, or when a table is made for it.
#[test]
fn steps_of_another_layout_are_refused() {
    let backend = shared();
    let shape = AttentionShape::new(2, 2, 64).unwrap();
    let case = Case::new(shape, SegmentFormat::per_channel(Bits::Four), ElementType::F32, 3);
    let stores = case.stores(&backend);
    let engine = Engine::new(&backend, &case, &stores);
    let more = {
        let mut capacities = case.layout.stores().to_vec();
        capacities[0].shard_pages[1] += 1;
        Arc::new(WriteLayout::new(shape, 24, capacities, case.layout.windows().to_vec()).unwrap())
    };
    let refused = |result: Result<(), Error>| assert!(matches!(result, Err(Error::Plan { .. })), "{result:?}");
    let table = WriteTable::new(&more);
    let mut encoder = backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    refused(engine.step.encode(&table, &mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default())));
    refused(engine.memory.write(backend.queue(), &table));
    let input =
        WriteInput { keys: &engine.keys, values: &engine.values, rows: case.rows, flags: &engine.flags, layer: 2 };
    let bind = |layout: &Arc<WriteLayout>, memory: &WriteMemory, input| {
        let of = [&stores[0], &stores[1]];
        StoreStep::new(layout).bind(backend.kernels(), &of, memory, input).map(drop)
    };
    refused(bind(&more, &WriteMemory::new(backend.device(), &more).unwrap(), Some(input)));
    refused(bind(&case.layout, &WriteMemory::new(backend.device(), &more).unwrap(), Some(input)));
    refused(bind(&case.layout, &engine.memory, None));
    refused(bind(&case.layout, &engine.memory, Some(WriteInput { layer: 3, ..input })));
    let few = kvpack::plan::RowLayout { tokens: 23, ..case.rows };
    refused(bind(&case.layout, &engine.memory, Some(WriteInput { rows: few, ..input })));
    bind(&case.layout, &engine.memory, Some(input)).unwrap();
}

/// A step with nothing of a kind has no dispatch of it: the pass stays empty, and the pages what they were.
#[test]
fn an_empty_step_changes_nothing() {
    let backend = shared();
    let shape = AttentionShape::new(1, 1, 64).unwrap();
    let case = Case::new(shape, SegmentFormat::saw_int4(), ElementType::F32, 4);
    let empty = Case {
        steps: vec![any_backend::step_writes::Step { writes: LayerWrites::of(&case.layout), ..case.steps[0].clone() }],
        ..case
    };
    let (stores, found) = written(&backend, &empty);
    let before = empty.stores(&backend);
    assert!(empty.decoded(&backend, &stores) == empty.decoded(&backend, &before));
    assert_eq!(found, []);
}

/// A chunk of a prompt in one step: 128 tokens of a page, whose values share all their words.
#[test]
fn whole_pages_of_tokens_are_stored_at_once() {
    let backend = shared();
    let shape = AttentionShape::new(2, 2, 128).unwrap();
    for format in [SegmentFormat::F16, SegmentFormat::saw_int4(), SegmentFormat::turboquant(Bits::Three, 128)] {
        fn store_of<B: Backend>(backend: &B, shape: AttentionShape, format: SegmentFormat) -> (B::Store, Vec<u32>) {
            let mut store = backend.create_store(shape, format).unwrap();
            block_on(backend.add_shard(&mut store, 1)).unwrap();
            let rows = kvpack::plan::RowLayout::token_major(TILE_TOKENS, &shape);
            let x = super::expected::values(rows.elements_needed(&shape), 4);
            let tensor = block_on(backend.upload(x.as_slice().into())).unwrap();
            let page = Page { shard: 0, index: 0 };
            let writes: Vec<TokenWrite> = (0..TILE_TOKENS)
                .map(|token| TokenWrite { token, page, slot: (token * 5 + 3) % TILE_TOKENS, centre: None })
                .collect();
            backend.append(&mut store, &tensor, &tensor, rows, &writes).unwrap();
            let read = kvpack::backend::SpanRead { pages: &[page], tokens: TILE_TOKENS, range_slot: 0, centre: None };
            let (keys, values) = backend.dequantize(&store, read).unwrap();
            let mut decoded = block_on(backend.download(&keys)).unwrap();
            decoded.extend(block_on(backend.download(&values)).unwrap());
            (store, decoded.into_iter().map(|x| (x + 0.0).to_bits()).collect())
        }
        assert!(store_of(&backend, shape, format).1 == store_of(&Cpu::new(), shape, format).1, "{format}");
    }
}
