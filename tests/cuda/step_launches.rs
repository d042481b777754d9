//! Launches for tensors that are known only when a layer runs, against the calls that submit.
//!
//!     cargo test --release --features cuda --test cuda -- --ignored step_launches::

use std::sync::Arc;

use kvpack::Error;
use kvpack::backend::Device;
use kvpack::cache::{ModelCache, TokenRun};
use kvpack::cuda::cudarc::driver::CudaStream;
use kvpack::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use kvpack::cuda::{Cuda, KernelCache, LayerTensors, ModelStep, StepLaunches, Tensor};
use kvpack::plan::{ElementType, RowLayout};
use pollster::block_on;

use any_backend::model_steps::{self, LAYERS, RECIPES};
use any_backend::random_rows::Random;

/// Sequences that decode.
const BATCH: usize = 2;

/// Rows that a step of the engine was bound to: more than it has.
const BOUND_ROWS: usize = 16;

fn zeroed(backend: &Cuda, rows: usize) -> LayerTensors {
    let of = |elements| Tensor::zeroed(backend.stream(), elements, ElementType::F32).unwrap();
    let [keys, values, queries, output] = model_steps::elements_of(rows).map(of);
    LayerTensors { keys, values, queries, output }
}

/// New tensors of a layer, with random rows.
fn random(backend: &Cuda, random: &mut Random, rows: usize) -> LayerTensors {
    let of = zeroed(backend, rows);
    for tensor in [&of.keys, &of.values, &of.queries] {
        let elements: Vec<f32> = (0..backend.elements(tensor)).map(|_| random.normal()).collect();
        tensor.write(backend.stream(), elements.as_slice().into()).unwrap();
    }
    of
}

fn steps(backend: &Cuda) -> ModelStep {
    let rows = RowLayout::token_major(BOUND_ROWS, &model_steps::shape());
    ModelStep::new(backend, rows, vec![zeroed(backend, BOUND_ROWS); LAYERS]).unwrap().keeping(4)
}

/// The launches of the open step, which is marked as stored.
fn launches(cache: &ModelCache<Cuda>, steps: &mut ModelStep) -> StepLaunches {
    let open = cache.open_steps().unwrap();
    let written = steps.write(&open).unwrap();
    let launches = written.launches().unwrap();
    written.replayed();
    launches
}

fn begin(cache: &mut ModelCache<Cuda>, runs: &[TokenRun]) {
    block_on(cache.reserve_for_append(runs)).unwrap();
    cache.begin_append(runs).unwrap();
}

/// A step through the calls that submit; returns the outputs.
fn submitted(cache: &mut ModelCache<Cuda>, backend: &Cuda, runs: &[TokenRun], of: &[LayerTensors]) -> Vec<Vec<f32>> {
    begin(cache, runs);
    let tokens = runs.iter().map(TokenRun::tokens).sum();
    let rows = RowLayout::token_major(tokens, &model_steps::shape());
    let layer = |(layer, of): (usize, &LayerTensors)| {
        block_on(cache.store(layer, rows, &of.keys, &of.values)).unwrap();
        block_on(backend.download(&block_on(cache.attend(layer, &of.queries, ElementType::F32)).unwrap())).unwrap()
    };
    let outputs = of.iter().enumerate().map(layer).collect();
    cache.commit().unwrap();
    outputs
}

fn nearly(given: &[f32], wanted: &[f32]) -> bool {
    let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let difference = norm(&mut given.iter().zip(wanted).map(|(a, b)| a - b));
    given.len() == wanted.len() && difference <= 1e-3 * norm(&mut wanted.iter().copied())
}

/// In one call or in two, on the backend's stream or another: the same is stored and attended to, from tensors that are
/// new in every layer of every step.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn new_tensors_in_every_layer_attend_as_calls_that_submit() {
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    let other = backend.stream().context().new_stream().unwrap();
    for name in RECIPES {
        let recipe = model_steps::recipe(name);
        let (mut cache, mut twin) = (model_steps::cache(&backend, &recipe), model_steps::cache(&backend, &recipe));
        let (mut steps, mut numbers) = (steps(&backend), Random::new(11));
        for turn in 0..12 {
            let tokens = if turn == 0 { 5 } else { 1 };
            let runs: Vec<TokenRun> = (0..BATCH).map(|sequence| TokenRun::chunk(sequence, tokens)).collect();
            let of: Vec<LayerTensors> = (0..LAYERS).map(|_| random(&backend, &mut numbers, BATCH * tokens)).collect();
            begin(&mut cache, &runs);
            let launches = launches(&cache, &mut steps);
            let stream = if turn % 2 == 0 { backend.stream() } else { &other };
            stream.join(backend.stream()).unwrap();
            for (layer, of) in of.iter().enumerate() {
                if turn % 3 == 0 {
                    launches.store_and_attend(stream, layer, of).unwrap();
                } else {
                    launches.store(stream, layer, &of.keys, &of.values).unwrap();
                    launches.attend(stream, layer, &of.queries, &of.output).unwrap();
                }
            }
            backend.stream().join(stream).unwrap();
            cache.commit().unwrap();
            let wanted = submitted(&mut twin, &backend, &runs, &of);
            for (layer, (of, wanted)) in of.iter().zip(&wanted).enumerate() {
                let found = block_on(backend.download(&of.output)).unwrap();
                assert!(nearly(&found, wanted), "{name}: layer {layer} of step {turn}");
            }
        }
    }
}

/// A graph of launches that outlives the step's owner reads and writes living memory, and repeats what it did.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn launches_keep_what_a_graph_needs() {
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    let (mut cache, mut steps) = (model_steps::cache(&backend, &model_steps::recipe("f16")), steps(&backend));
    let of = random(&backend, &mut Random::new(3), BATCH);
    let runs: Vec<TokenRun> = (0..BATCH).map(TokenRun::decode).collect();
    begin(&mut cache, &runs);
    let launches = launches(&cache, &mut steps);
    let stream: &Arc<CudaStream> = backend.stream();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    (0..LAYERS).for_each(|layer| launches.store_and_attend(stream, layer, &of).unwrap());
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().expect("a graph");
    graph.launch().unwrap();
    let wanted = block_on(backend.download(&of.output)).unwrap();
    cache.commit().unwrap();
    drop((cache, steps));
    graph.launch().unwrap();
    assert_eq!(block_on(backend.download(&of.output)).unwrap(), wanted);
    assert!(wanted.iter().all(|x| x.is_finite()) && wanted.iter().any(|&x| x != 0.0));
}

/// Wrong layers and short tensors are refused, and so is a prompt that is packed as a span.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_launches_refuse() {
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    let (mut cache, mut steps) = (model_steps::cache(&backend, &model_steps::recipe("f16")), steps(&backend));
    let runs: Vec<TokenRun> = (0..BATCH).map(TokenRun::decode).collect();
    begin(&mut cache, &runs);
    let (of, short, stream) = (zeroed(&backend, BATCH), zeroed(&backend, BATCH - 1), backend.stream());
    let found = launches(&cache, &mut steps);
    assert!(matches!(found.store(stream, LAYERS, &of.keys, &of.values), Err(Error::Plan { .. })));
    assert!(matches!(found.attend(stream, LAYERS, &of.queries, &of.output), Err(Error::Plan { .. })));
    let refused = [
        found.store(stream, 0, &short.keys, &of.values),
        found.store(stream, 0, &of.keys, &short.values),
        found.attend(stream, 0, &short.queries, &of.output),
        found.attend(stream, 0, &of.queries, &short.output),
        found.store_and_attend(stream, 0, &short),
    ];
    for (i, refused) in refused.into_iter().enumerate() {
        assert!(matches!(refused, Err(Error::Elements { .. })), "call {i}");
    }
    cache.abandon();
}

/// Steps of other rows have launches of their own, although their sizes belong to one class, and each asks for its rows.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn launches_ask_for_the_rows_of_their_step() {
    let backend = Cuda::open(0, KernelCache::of_user()).unwrap();
    let (mut cache, mut steps) = (model_steps::cache(&backend, &model_steps::recipe("f16")), steps(&backend));
    let (of, stream) = ([BATCH, BATCH + 1].map(|rows| zeroed(&backend, rows)), backend.stream());
    let mut classes = Vec::new();
    for rows in [BATCH, BATCH + 1].repeat(3) {
        let runs: Vec<TokenRun> = (0..rows).map(TokenRun::decode).collect();
        begin(&mut cache, &runs);
        let open = cache.open_steps().unwrap();
        let written = steps.write(&open).unwrap();
        let found = written.launches().unwrap();
        classes.push(written.class());
        written.replayed();
        drop(open);
        let short = found.store_and_attend(stream, 0, &of[0]);
        assert_eq!(short.is_ok(), rows == BATCH, "{rows} rows: {short:?}");
        (0..LAYERS).for_each(|layer| found.store_and_attend(stream, layer, &of[rows - BATCH]).unwrap());
        cache.commit().unwrap();
    }
    // The first steps find empty sequences.
    assert_eq!(classes[2..4], classes[4..]);
    assert_ne!(classes[2], classes[3]);
}
