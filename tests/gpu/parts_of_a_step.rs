//! Steps of layers that hold different numbers of tokens: one `ModelStep` serves all parts, at the price of one part.
//!
//! What a step costs the host is printed: `TOKENS=4096 STEPS=1000 cargo test --release --test gpu parts_share --
//! --nocapture`, on an adapter that `gpu_device` names.

use std::time::{Duration, Instant};

use kvpack::backend::Device;
use kvpack::cache::{DenseLayer, ModelCache, Recipe, StoreRoom, TokenRun};
use kvpack::cpu::Cpu;
use kvpack::plan::{ElementType, RowLayout};
use kvpack::policy::{LayerSelection, Policy, Selection};
use kvpack::wgpu::{LayerTensors, ModelStep, Tensor, Wgpu};
use kvpack::{AttentionShape, Error};
use pollster::block_on;

use crate::gpu_device;
use crate::model_step::made;
use crate::round_trips::newest_submission;
use any_backend::compressed::Prompt;
use any_backend::model_steps::{self, LAYERS, ROWS, recipe, shape};
use any_backend::random_rows::Random;

/// A step of all layers on the device, in one pass and one submission, against the same on the CPU. Returns its parts,
/// and whether something was bound for it.
fn step(
    (cache, twin): (&mut ModelCache<Wgpu>, &mut ModelCache<Cpu>),
    (steps, tensors): (&mut ModelStep, &[LayerTensors]),
    runs: &[TokenRun],
    random: &mut Random,
) -> (usize, bool) {
    let backend = cache.backend().clone();
    let inputs = model_steps::inputs(random);
    for (of, rows) in tensors.iter().zip(&inputs) {
        for (tensor, rows) in [&of.keys, &of.values, &of.queries].into_iter().zip(rows) {
            backend.queue().write_buffer(tensor.buffer(), tensor.offset(), bytemuck::cast_slice(rows));
        }
    }
    block_on(cache.reserve_for_append(runs)).unwrap();
    cache.begin_append(runs).unwrap();
    let open = cache.open_steps().unwrap();
    let written = steps.write(&open).unwrap();
    let told = (open.len(), written.bound_anew());
    let mut encoder = backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
    for layer in 0..LAYERS {
        written.encode_store(layer, &mut pass).unwrap();
        written.encode_attend(layer, &mut pass).unwrap();
    }
    assert!(matches!(written.encode_store(LAYERS, &mut pass), Err(Error::Plan { .. })));
    drop(pass);
    backend.queue().submit([encoder.finish()]);
    cache.commit().unwrap();
    let outputs: Vec<_> = tensors.iter().map(|of| block_on(backend.download(&of.output)).unwrap()).collect();
    model_steps::compare(twin, runs, &inputs, &outputs);
    told
}

/// Layers part and join while one `ModelStep` serves them, beside a layer of another kind that has a part of its own.
#[test]
fn one_step_serves_all_parts() {
    for name in ["saw-int4", "f16", "kivi:4+window=0", "calibquant:2"] {
        let backend = gpu_device::fresh();
        let prompt = Prompt::new(shape(), LAYERS, 300, 11);
        // The second layer is of another kind: the layers of a part are not next to each other.
        let layers: Vec<(AttentionShape, Recipe)> =
            [name, "int8", name].iter().map(|name| (shape(), recipe(name))).collect();
        let mut cache = ModelCache::new(&backend, &layers, 3).unwrap();
        let mut twin = ModelCache::new(&Cpu::new(), &layers, 3).unwrap();
        let zeroed = |_| LayerTensors::zeroed(backend.device(), &shape(), ROWS, ElementType::F32).unwrap();
        let tensors: Vec<LayerTensors> = (0..LAYERS).map(zeroed).collect();
        let rows = RowLayout::token_major(ROWS, &shape());
        let mut steps = ModelStep::new(&backend, rows, tensors.clone()).unwrap();
        block_on(steps.prepare(&cache)).unwrap();
        block_on(steps.prepare_chunks(&cache, ROWS)).unwrap();
        let compiled = || backend.device().get_internal_counters().hal.compute_pipelines.read();
        let mut random = Random::new(7);
        let mut run = |cache: &mut _, twin: &mut _, runs: &[TokenRun]| {
            step((cache, twin), (&mut steps, &tensors), runs, &mut random)
        };
        assert_eq!(run(&mut cache, &mut twin, &[TokenRun::chunk(1, 5), TokenRun::prompt(2, 6)]), (2, true), "{name}");
        let policy = Policy::pyramidkv(0.4).unwrap();
        block_on(cache.compress(0, &prompt.observe(&cache, policy.clone()))).unwrap();
        block_on(twin.compress(0, &prompt.observe(&twin, policy))).unwrap();
        assert_ne!(cache.tokens(0, 0), cache.tokens(LAYERS - 1, 0), "{name}: layers hold different tokens");
        let prepared = compiled();
        for turn in 0..6 {
            let runs = match turn % 3 {
                0 => vec![TokenRun::decode(0), TokenRun::chunk(1, 4), TokenRun::decode(2)],
                1 => vec![TokenRun::prompt(0, 5), TokenRun::decode(1)],
                _ => vec![TokenRun::decode(0), TokenRun::decode(1), TokenRun::decode(2)],
            };
            assert_eq!(run(&mut cache, &mut twin, &runs).0, LAYERS, "{name}");
        }
        let again = [TokenRun::decode(0), TokenRun::decode(1), TokenRun::decode(2)];
        assert_eq!(run(&mut cache, &mut twin, &again), (LAYERS, false), "{name}: nothing changed");
        assert_eq!(compiled(), prepared, "{name}: a kernel was compiled");
        cache.clear(0).unwrap();
        twin.clear(0).unwrap();
        let runs = [TokenRun::decode(0), TokenRun::decode(1)];
        for _ in 0..3 {
            let (parts, _) = run(&mut cache, &mut twin, &runs);
            assert!(parts <= LAYERS, "{name}");
        }
    }
}

/// Parts that are not those of the step's layers.
#[test]
fn parts_of_other_layers_are_refused() {
    let backend = gpu_device::shared();
    let mut cache = ModelCache::new(&backend, &["f16", "int8"].map(|name| (shape(), recipe(name))), 1).unwrap();
    let of = LayerTensors::zeroed(backend.device(), &shape(), ROWS, ElementType::F32).unwrap();
    let rows = RowLayout::token_major(ROWS, &shape());
    let mut steps = ModelStep::new(&backend, rows, vec![of; 2]).unwrap();
    block_on(cache.reserve_for_append(&[TokenRun::decode(0)])).unwrap();
    cache.begin_append(&[TokenRun::decode(0)]).unwrap();
    let refusal = |steps: &mut ModelStep, parts: &[_]| match steps.write(parts).map(drop) {
        Err(Error::Plan { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    let open = cache.open_steps().unwrap();
    let told = refusal(&mut steps, &open[..1]);
    assert!(told.contains("1 layers in 1 parts, and tensors of 2"), "{told}");
    let twice: Vec<_> = cache.open_steps().unwrap().into_iter().take(1).chain(cache.open_steps().unwrap()).collect();
    assert!(refusal(&mut steps, &twice[..2]).contains("layer 0 is in two parts"));
    assert!(refusal(&mut steps, &[]).contains("0 layers"));
    let mut nothing = cache.open_steps().unwrap();
    (nothing[0].layers, nothing[0].stores) = (&[], Vec::new());
    assert!(refusal(&mut steps, &nothing).contains("1 layers"));
    steps.write(&open).unwrap();
}

/// The model whose steps are measured.
const MEASURED_LAYERS: usize = 32;
const MEASURED_SEQUENCES: usize = 8;

/// A number of the environment.
fn asked(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

struct Measured {
    parts: usize,
    /// Begin, write, encode, finish and commit, and all of it: the least of all steps.
    host: [Duration; 6],
    /// All of it, the median of all steps.
    median: Duration,
    /// Bytes of tables and scratch.
    bytes: isize,
    /// Buffers that a step makes in `write`, and submissions.
    staging: isize,
    submissions: u64,
}

/// Steps of a cache that are encoded and dropped.
fn measure(cache: &mut ModelCache<Wgpu>, of: &LayerTensors) -> Measured {
    let backend = cache.backend().clone();
    let (device, shape) = (backend.device(), *cache.shape(0).unwrap());
    let runs: Vec<TokenRun> = (0..MEASURED_SEQUENCES).map(TokenRun::decode).collect();
    let rows = RowLayout::token_major(MEASURED_SEQUENCES, &shape);
    let mut steps = ModelStep::new(&backend, rows, vec![of.clone(); MEASURED_LAYERS]).unwrap();
    block_on(steps.prepare(&*cache)).unwrap();
    let nothing_is_left = || {
        backend.queue().submit([]);
        device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
    };
    nothing_is_left();
    let before = made(device);
    let mut of_step =
        Measured { parts: 0, host: [Duration::MAX; 6], median: Duration::ZERO, bytes: 0, staging: 0, submissions: 0 };
    let mut all = Vec::new();
    for _ in 0..asked("STEPS", 40) {
        nothing_is_left();
        let (newest, held) = (newest_submission(&backend), made(device));
        let begin = Instant::now();
        cache.begin_append(&runs).unwrap();
        let write = Instant::now();
        let open = cache.open_steps().unwrap();
        of_step.parts = open.len();
        let written = steps.write(&open).unwrap();
        let encode = Instant::now();
        let bound = made(device);
        if !written.bound_anew() {
            of_step.staging = bound[0] - held[0];
        }
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for layer in 0..MEASURED_LAYERS {
            written.encode_store(layer, &mut pass).unwrap();
            written.encode_attend(layer, &mut pass).unwrap();
        }
        assert_eq!(made(device)[..3], bound[..3], "encoding makes nothing on the device");
        drop(pass);
        let finish = Instant::now();
        let commands = encoder.finish();
        let commit = Instant::now();
        drop((written, open));
        cache.commit().unwrap();
        let end = Instant::now();
        drop(commands); // what is encoded is not run
        of_step.submissions = newest_submission(&backend) - newest - 1;
        let took = [write - begin, encode - write, finish - encode, commit - finish, end - commit, end - begin];
        all.push(end - begin);
        of_step.host.iter_mut().zip(took).for_each(|(least, took)| *least = (*least).min(took));
    }
    nothing_is_left();
    of_step.bytes = made(device)[4] - before[4];
    all.sort_unstable();
    of_step.median = all[all.len() / 2];
    of_step
}

/// 32 layers of 8 KV heads × 128 and 8 sequences, before and after layers keep numbers of tokens of their own, as
/// VL-Cache has them keep: one `ModelStep`, one staging buffer, and nearly the same memory.
#[test]
fn parts_share_memory_and_an_upload() {
    let shape = AttentionShape::new(32, 8, 128).unwrap();
    let (tokens, steps) = (asked("TOKENS", 1024), asked("STEPS", 40));
    for name in ["f16", "saw-int4"] {
        let backend = gpu_device::fresh();
        let of = LayerTensors::zeroed(backend.device(), &shape, MEASURED_SEQUENCES, ElementType::F32).unwrap();
        let layers = vec![(shape, recipe(name)); MEASURED_LAYERS];
        let pages = MEASURED_SEQUENCES * (tokens + 3 * steps).div_ceil(128);
        let stores = layers[0].1.stores().len();
        let room = |store| StoreRoom { pages: if store + 1 == stores { pages } else { 8 }, spans: 0 };
        let room: Vec<StoreRoom> = (0..stores).map(room).collect();
        let new = || {
            let mut cache = ModelCache::new(&backend, &layers, MEASURED_SEQUENCES).unwrap();
            block_on(cache.reserve(&room)).unwrap();
            cache
        };
        let mut cache = new();
        for sequence in 0..MEASURED_SEQUENCES {
            cache.begin_append(&[TokenRun::chunk(sequence, tokens)]).unwrap();
            let open = cache.open_steps().unwrap();
            open.iter().flat_map(|part| part.layers).for_each(|&layer| open[0].stored.mark(layer));
            drop(open);
            cache.commit().unwrap();
        }
        let before = measure(&mut cache, &of);
        drop(cache);

        let mut cache = new();
        let row = shape.kv_heads() * shape.head_dim();
        let zeroed = Tensor::zeroed(backend.device(), tokens * row, ElementType::F32).unwrap();
        let dense = DenseLayer { rows: RowLayout::token_major(tokens, &shape), keys: zeroed.clone(), values: zeroed };
        let of_layer = |layer: usize| {
            let kept = (0..(tokens / 5 + layer * tokens / 45) as u32).collect();
            LayerSelection::new(tokens, vec![kept; shape.kv_heads()]).unwrap()
        };
        let kept = Selection::new((0..MEASURED_LAYERS).map(of_layer).collect()).unwrap();
        block_on(cache.keep(0, vec![dense; MEASURED_LAYERS], &kept)).unwrap();
        (1..MEASURED_SEQUENCES).for_each(|sequence| cache.fork(0, sequence).unwrap());
        let after = measure(&mut cache, &of);

        for (when, of) in [("before", &before), ("after", &after)] {
            let [begin, write, encode, finish, commit, all] = of.host.map(|took| took.as_secs_f64() * 1e6);
            println!(
                "{name}, {tokens} tokens, {when}: {} parts, begin {begin:.0} µs, write {write:.0}, encode {encode:.0}, \
                 finish {finish:.0}, commit {commit:.0}, all {all:.0}, median {:.0}; {} bytes, {} staging buffers, {} submissions",
                of.parts,
                of.median.as_secs_f64() * 1e6,
                of.bytes,
                of.staging,
                of.submissions
            );
        }
        assert_eq!((before.parts, after.parts), (1, MEASURED_LAYERS), "{name}");
        assert_eq!([before.staging, after.staging], [1, 1], "{name}: staging buffers");
        assert_eq!([before.submissions, after.submissions], [0, 0], "{name}");
        assert!(after.bytes * 10 <= before.bytes * 13, "{name}: {} bytes became {}", before.bytes, after.bytes);
    }
}
