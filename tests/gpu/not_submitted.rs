//! Calls that submit commands of their own, while an engine has encoded steps and not submitted them: they would read
//! and write pages before those steps, so they are refused, and nothing changes. `gpu_device` says on which adapter.

use std::sync::Arc;

use kvpack::backend::{Device, Storage, TokenWrite, WriteInput};
use kvpack::cache::{KvCache, ModelCache, Recipe, StoreRoom, StoredSpan, TokenRun};
use kvpack::cpu::Cpu;
use kvpack::plan::{ElementType, LayerWrites, Page, QueryRun, RowLayout, WriteLayout, WriteTable};
use kvpack::policy::Policy;
use kvpack::wgpu::{LayerTensors, ModelStep, NonFiniteFlags, StoreStep, Wgpu, WriteMemory};
use kvpack::{Error, Result, SegmentFormat};
use pollster::block_on;

use crate::gpu_device;
use any_backend::compressed::Prompt;
use any_backend::growing_stores::shards;
use any_backend::kept_together::{TOKENS, dense, selection};
use any_backend::model_steps::{self, LAYERS, ROWS, shape};
use any_backend::random_rows::Random;

/// An engine whose layers share their tensors' contents, and the same cache on the CPU.
struct Engine {
    backend: Wgpu,
    cache: ModelCache<Wgpu>,
    twin: ModelCache<Cpu>,
    tensors: Vec<LayerTensors>,
    steps: ModelStep,
    random: Random,
}

impl Engine {
    fn new(recipe: &str) -> Self {
        Self::on(gpu_device::shared(), recipe)
    }

    fn on(backend: Wgpu, recipe: &str) -> Self {
        let recipe = model_steps::recipe(recipe);
        let zeroed = |_| LayerTensors::zeroed(backend.device(), &shape(), ROWS, ElementType::F32).unwrap();
        let tensors: Vec<LayerTensors> = (0..LAYERS).map(zeroed).collect();
        let (cache, twin) = (model_steps::cache(&backend, &recipe), model_steps::cache(&Cpu::new(), &recipe));
        let steps = ModelStep::new(&backend, RowLayout::token_major(ROWS, &shape()), tensors.clone()).unwrap();
        Self { backend, cache, twin, tensors, steps, random: Random::new(3) }
    }

    /// Encodes and commits a step on the device, and runs it on the CPU.
    fn encode(&mut self, runs: &[TokenRun]) -> wgpu::CommandEncoder {
        let inputs = model_steps::inputs(&mut self.random);
        for (of, rows) in self.tensors.iter().zip(&inputs) {
            for (tensor, rows) in [&of.keys, &of.values, &of.queries].into_iter().zip(rows) {
                self.backend.queue().write_buffer(tensor.buffer(), tensor.offset(), bytemuck::cast_slice(rows));
            }
        }
        let encoder = self.encode_open(runs);
        self.cache.commit().unwrap();
        model_steps::submit(&mut self.twin, runs, &inputs);
        encoder
    }

    /// Encodes a step on the device and leaves it open.
    fn encode_open(&mut self, runs: &[TokenRun]) -> wgpu::CommandEncoder {
        self.cache.begin_append(runs).unwrap();
        let open = self.cache.open_steps().unwrap();
        let step = self.steps.write(&open).unwrap();
        let mut encoder = self.backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        // As an engine with kernels between the layers, and with two passes for one step.
        for layer in 0..LAYERS {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            step.encode_store(layer, &mut pass).unwrap();
            step.encode_attend(layer, &mut pass).unwrap();
        }
        encoder
    }

    fn submit(&self, encoder: wgpu::CommandEncoder) {
        self.backend.queue().submit([encoder.finish()]);
    }
}

fn refusal<T>(call: Result<T>, steps: usize, what: &str) {
    match call.map(drop) {
        Err(Error::NotSubmitted { steps: found, .. }) => assert_eq!(found, steps, "{what}"),
        other => panic!("{what}: {other:?}"),
    }
}

fn rows<D: Device>(device: &D, spans: &[StoredSpan<D::Tensor>]) -> Vec<f32> {
    let of = |span: &StoredSpan<D::Tensor>| {
        [&span.keys, &span.values].map(|rows| block_on(device.download(rows)).unwrap()).concat()
    };
    spans.iter().flat_map(of).collect()
}

/// Every call is refused until the commands are submitted, and works as soon as they are, before they are finished.
#[test]
fn calls_that_submit_are_refused_until_steps_are_submitted() {
    // Tokens that are packed as they arrive, and by windows with a slot of ranges for each.
    for recipe in ["saw-int4", "calibquant:2+window=0"] {
        let mut engine = Engine::new(recipe);
        let stores = engine.cache.recipe(0).unwrap().stores().len();
        block_on(engine.cache.reserve(&vec![StoreRoom { pages: 12, spans: 4 }; stores])).unwrap();
        // A sequence that waits on the host, and tokens of one whose tile becomes due.
        let first = engine.encode(&[TokenRun::chunk(2, 5)]);
        engine.submit(first);
        let swapped = block_on(engine.cache.swap_out(2)).unwrap();
        engine.twin.clear(2).unwrap();
        for _ in 0..128 / 8 {
            let step = engine.encode(&[TokenRun::chunk(0, 8), TokenRun::chunk(1, 4)]);
            engine.submit(step);
        }
        let encoded = engine.encode(&[TokenRun::chunk(0, 3), TokenRun::decode(1)]);

        let prompt = Prompt::new(shape(), LAYERS, TOKENS, 11);
        let (backend, cache) = (engine.backend.clone(), &mut engine.cache);
        let held = [cache.length(0).unwrap(), cache.length(1).unwrap(), 0];
        refusal(block_on(cache.swap_out(0)), 1, "swap_out");
        refusal(block_on(cache.swap_in(2, &swapped)), 1, "swap_in");
        refusal(cache.dequantize(0, 0), 1, "dequantize");
        refusal(block_on(cache.keep(2, dense(&prompt, &backend), &selection(|_| 64))), 1, "keep");
        let observed = prompt.observe(cache, Policy::random(0.3, 5).unwrap());
        refusal(block_on(cache.compress(2, &observed)), 1, "compress");
        let (policy, spans) = (Policy::random(0.5, 5).unwrap(), any_backend::compressed::growing::spans(held[0]));
        refusal(block_on(cache.compress_again(0, &policy, &spans, &[])), 1, "compress_again");
        refusal(block_on(cache.non_finite()), 1, "non_finite");
        refusal(cache.clear_non_finite(), 1, "clear_non_finite");
        if recipe != "saw-int4" {
            refusal(block_on(cache.pack_windows(0)), 1, "pack_windows");
            refusal(block_on(cache.reserve(&vec![StoreRoom { pages: 0, spans: 64 }; stores])), 1, "reserve");
        }
        cache.begin_attend(&[QueryRun::decode(0)]).unwrap();
        let queries = block_on(backend.upload([0.5f32; 4 * 64].as_slice().into())).unwrap();
        refusal(block_on(cache.attend(0, &queries, ElementType::F32)), 1, "attend");
        cache.abandon();
        for (sequence, held) in held.into_iter().enumerate() {
            assert_eq!(cache.length(sequence), Ok(held), "{recipe}: a refusal changed sequence {sequence}");
        }
        // What only changes page tables needs no commands.
        cache.fork(0, 2).unwrap();
        cache.truncate(2, 4).unwrap();
        cache.clear(2).unwrap();
        cache.trim().unwrap();

        engine.submit(encoded);
        let cache = &mut engine.cache;
        block_on(cache.pack_windows(0)).unwrap();
        block_on(engine.twin.pack_windows(0)).unwrap();
        let away = block_on(cache.swap_out(0)).unwrap();
        block_on(cache.swap_in(0, &away)).unwrap();
        block_on(cache.swap_in(2, &swapped)).unwrap();
        for (layer, sequence) in (0..LAYERS).flat_map(|layer| [(layer, 0), (layer, 1)]) {
            let found = rows(&engine.backend, &cache.dequantize(layer, sequence).unwrap());
            let expected = rows(&Cpu::new(), &engine.twin.dequantize(layer, sequence).unwrap());
            assert_eq!(found.len(), expected.len(), "{recipe}");
            let near = |(found, expected): (&f32, &f32)| (found - expected).abs() <= 1e-2;
            assert!(found.iter().zip(&expected).all(near), "{recipe}: layer {layer}, sequence {sequence}");
        }
    }
}

/// Commands that are dropped are not waited for; every step counts once, whatever its passes and layers; another cache
/// on the device goes on.
#[test]
fn steps_count_until_they_are_submitted_or_dropped() {
    let mut engine = Engine::new("f16");
    block_on(engine.cache.reserve(&[StoreRoom { pages: 8, spans: 0 }])).unwrap();
    let first = engine.encode(&[TokenRun::chunk(0, 4)]);
    let second = engine.encode(&[TokenRun::decode(0)]);
    let dropped = engine.encode_open(&[TokenRun::decode(1)]);
    engine.cache.abandon();
    refusal(block_on(engine.cache.swap_out(0)), 3, "three");
    drop(dropped);
    refusal(block_on(engine.cache.swap_out(0)), 2, "two");
    let mut other = model_steps::cache(&engine.backend, &Recipe::f16());
    let prompt = Prompt::new(shape(), LAYERS, TOKENS, 11);
    block_on(other.keep(0, dense(&prompt, &engine.backend), &selection(|_| 64))).unwrap();
    let finished = first.finish();
    refusal(block_on(engine.cache.swap_out(0)), 2, "finished encoders are not submitted");
    engine.backend.queue().submit([finished]);
    refusal(block_on(engine.cache.swap_out(0)), 1, "one");
    engine.submit(second);
    assert_eq!(block_on(engine.cache.swap_out(0)).unwrap().length(), 5);

    // Steps that are gone with their encoder's owner leave their commands behind.
    let encoded = engine.encode(&[TokenRun::chunk(2, 4)]);
    let Engine { backend, mut cache, steps, .. } = engine;
    drop(steps);
    refusal(block_on(cache.swap_out(2)), 1, "a dropped ModelStep");
    backend.queue().submit([encoded.finish()]);
    block_on(cache.swap_out(2)).unwrap();
}

/// Tokens of encoded steps are not lost: a store that would get a larger shard gets one more as long as steps wait, and
/// a larger one as soon as they are submitted.
#[test]
fn steps_write_the_shard_that_they_were_encoded_for() {
    let mut engine = Engine::new("f16");
    let most = engine.backend.shards_at_once();
    // Sequences in the last page of as many shards as steps read at once.
    for pages in 1..=most {
        block_on(engine.cache.reserve(&[StoreRoom { pages, spans: 0 }])).unwrap();
    }
    for _ in 0..(most - 2) * 128 / 8 {
        let step = engine.encode(&[TokenRun::chunk(0, 8)]);
        engine.submit(step);
    }
    let encoded = engine.encode(&[TokenRun::chunk(1, 6), TokenRun::chunk(2, 5)]);
    assert_eq!(engine.cache.free_room(0).unwrap()[0].pages, 0, "the step writes the newest shard");
    block_on(engine.cache.reserve(&[StoreRoom { pages: 1, spans: 0 }])).unwrap();
    engine.submit(encoded);
    assert_eq!(shards(&mut engine.cache), [most + 1]);
    for reserved in [3, 4] {
        block_on(engine.cache.reserve(&[StoreRoom { pages: reserved, spans: 0 }])).unwrap();
        assert_eq!(shards(&mut engine.cache), [most + 1], "a larger shard");
        // What was bound to the replaced shard must not serve this step.
        let step = engine.encode(&[TokenRun::chunk(0, 4), TokenRun::decode(1), TokenRun::decode(2)]);
        engine.submit(step);
    }
    for (layer, sequence) in (0..LAYERS).flat_map(|layer| [(layer, 0), (layer, 1), (layer, 2)]) {
        let found = rows(&engine.backend, &engine.cache.dequantize(layer, sequence).unwrap());
        let expected = rows(&Cpu::new(), &engine.twin.dequantize(layer, sequence).unwrap());
        assert!(found == expected, "layer {layer}, sequence {sequence}");
    }
}

/// A step that is submitted layer by layer does not overtake one that is encoded.
#[test]
fn a_submitted_layer_overtakes_no_encoded_step() {
    let mut engine = Engine::new("f16");
    block_on(engine.cache.reserve(&[StoreRoom { pages: 8, spans: 0 }])).unwrap();
    let encoded = engine.encode(&[TokenRun::chunk(0, 4)]);
    engine.cache.begin_append(&[TokenRun::decode(0)]).unwrap();
    let open = engine.cache.open_steps().unwrap();
    let given = LayerTensors::zeroed(engine.backend.device(), &shape(), 1, ElementType::F32).unwrap();
    let step = engine.steps.write(&open).unwrap();
    refusal(step.submit(0, &given), 1, "submit");
    engine.backend.queue().submit([encoded.finish()]);
    (0..LAYERS).for_each(|layer| step.submit(layer, &given).unwrap());
    engine.cache.commit().unwrap();
    assert_eq!(block_on(engine.cache.swap_out(0)).unwrap().length(), 5);
}

/// Nor one that another engine encoded over the same cache.
#[test]
fn a_submitted_layer_overtakes_no_step_of_another_engine() {
    let mut engine = Engine::new("f16");
    block_on(engine.cache.reserve(&[StoreRoom { pages: 8, spans: 0 }])).unwrap();
    let rows = RowLayout::token_major(ROWS, &shape());
    let mut other = ModelStep::new(&engine.backend, rows, engine.tensors.clone()).unwrap();
    let encoded = engine.encode(&[TokenRun::chunk(0, 4)]);
    engine.cache.begin_append(&[TokenRun::decode(0)]).unwrap();
    let open = engine.cache.open_steps().unwrap();
    let given = LayerTensors::zeroed(engine.backend.device(), &shape(), 1, ElementType::F32).unwrap();
    let step = other.write(&open).unwrap();
    refusal(step.submit(0, &given), 1, "submit");
    engine.backend.queue().submit([encoded.finish()]);
    (0..LAYERS).for_each(|layer| step.submit(layer, &given).unwrap());
    engine.cache.commit().unwrap();
    assert_eq!(block_on(engine.cache.swap_out(0)).unwrap().length(), 5);
}

/// A layer whose output cannot be copied is not stored: nothing is submitted, and the step waits for it.
#[test]
fn a_refused_output_stores_nothing() {
    let mut engine = Engine::new("f16");
    block_on(engine.cache.reserve(&[StoreRoom { pages: 8, spans: 0 }])).unwrap();
    engine.cache.begin_append(&[TokenRun::decode(0)]).unwrap();
    let open = engine.cache.open_steps().unwrap();
    let given = LayerTensors::zeroed(engine.backend.device(), &shape(), 1, ElementType::F32).unwrap();
    let in_place = LayerTensors { output: engine.tensors[0].output.clone(), ..given.clone() };
    let step = engine.steps.write(&open).unwrap();
    let refused = step.submit(0, &in_place);
    assert!(matches!(refused, Err(Error::Buffer { .. })), "{refused:?}");
    (1..LAYERS).for_each(|layer| step.submit(layer, &given).unwrap());
    let early = engine.cache.commit();
    assert!(matches!(early, Err(Error::Plan { .. })), "layer 0 is missing: {early:?}");
    engine.cache.abandon();
}

/// Where tables of further steps do not fit the device, they do again once steps are submitted.
#[test]
fn tables_that_did_not_fit_ask_for_less_later() {
    let backend = gpu_device::shared().with_binding_limit(1 << 16);
    let mut engine = Engine::on(backend.clone(), "f16");
    block_on(engine.cache.reserve(&[StoreRoom { pages: 8, spans: 0 }])).unwrap();
    let mut encoded = Vec::new();
    loop {
        engine.cache.begin_append(&[TokenRun::decode(0)]).unwrap();
        let open = engine.cache.open_steps().unwrap();
        let step = match engine.steps.write(&open) {
            Ok(step) => step,
            Err(error) => {
                let bytes = matches!(&error, Error::Limit { what, .. } if what.contains("bytes"));
                assert!(bytes, "after {} steps: {error}", encoded.len());
                break;
            }
        };
        let mut encoder = backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for layer in 0..LAYERS {
            step.encode_store(layer, &mut pass).unwrap();
            step.encode_attend(layer, &mut pass).unwrap();
        }
        drop(pass);
        encoded.push(encoder.finish());
        engine.cache.commit().unwrap();
    }
    engine.cache.abandon();
    backend.queue().submit(encoded);
    backend.device().poll(wgpu::PollType::wait_indefinitely()).unwrap();
    let again = engine.encode_open(&[TokenRun::decode(0)]);
    engine.cache.commit().unwrap();
    engine.submit(again);
}

/// The same for a layer that an engine binds by itself.
#[test]
fn a_layer_that_is_bound_alone_is_known_too() {
    let backend = gpu_device::shared();
    let mut cache = KvCache::new(backend.clone(), shape(), 1, Recipe::pack_all(SegmentFormat::saw_int4())).unwrap();
    let rows = RowLayout::token_major(1, &shape());
    let token = block_on(backend.upload([0.5f32; 2 * 64].as_slice().into())).unwrap();
    block_on(cache.append(rows, &token, &token)).unwrap();
    let store = cache.stores()[1];
    let layout = Arc::new(WriteLayout::new(shape(), 1, vec![store.step_capacity(1, 0)], vec![]).unwrap());
    let memory = WriteMemory::new(backend.device(), &layout).unwrap();
    let flags = NonFiniteFlags::new(backend.device(), 1).unwrap();
    let input = WriteInput { keys: &token, values: &token, rows, flags: &flags, layer: 0 };
    let step = StoreStep::new(&layout).bind(backend.kernels(), &[store], &memory, Some(input)).unwrap();
    let (mut writes, mut table) = (LayerWrites::of(&layout), WriteTable::new(&layout));
    let page = Page { shard: 0, index: 0 };
    writes.stores[0].tokens.push(TokenWrite { token: 0, page, slot: 1, centre: None });
    table.set(&writes).unwrap();
    memory.write(backend.queue(), &table).unwrap();
    let mut encoder = backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    step.encode(&table, &mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default())).unwrap();
    refusal(cache.dequantize(0), 1, "dequantize");
    refusal(block_on(flags.read(backend.device(), backend.queue())), 1, "flags");
    refusal(memory.write(backend.queue(), &table), 1, "its table");
    backend.queue().submit([encoder.finish()]);
    cache.dequantize(0).unwrap();
    assert_eq!(block_on(flags.read(backend.device(), backend.queue())), Ok(vec![]));
    memory.write(backend.queue(), &table).unwrap();
}
