//! How an inference engine uses kvpack on CUDA: its own stream, one graph for all layers, replayed while
//! sequences grow.
//!
//!     cargo run --release --features cuda --example engine_graph
//!
//! `engine_integration` is the same through wgpu. Here four sequences decode at 4 bits; the outputs are compared with
//! those of the cache's own calls.

use std::error::Error;

use kvpack::cache::{ModelCache, Recipe, StoreRoom, TokenRun};
use kvpack::cpu::nmse;
use kvpack::cuda::cudarc::driver::CudaGraph;
use kvpack::cuda::cudarc::driver::sys::CUgraphInstantiate_flags;
use kvpack::cuda::cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
use kvpack::cuda::{Cuda, KernelCache, LaunchMemory, LayerTensors, ModelStep, Tensor};
use kvpack::plan::{ElementType, RowLayout};
use kvpack::{AttentionShape, SegmentFormat};

const LAYERS: usize = 4;
const SEQUENCES: usize = 4;
const DECODED: usize = 300;

fn main() -> Result<(), Box<dyn Error>> {
    pollster::block_on(run())
}

async fn run() -> Result<(), Box<dyn Error>> {
    let backend = Cuda::open(0, KernelCache::of_user())?;
    let stream = backend.stream();

    // A cache for all layers, with a budget that it never leaves: pages of 128 tokens, all of them at 4 bits.
    let shape = AttentionShape::new(32, 8, 128)?;
    let recipe = Recipe::pack_all(SegmentFormat::saw_int4());
    let budget = [StoreRoom::default(), StoreRoom { pages: SEQUENCES * DECODED.div_ceil(128), spans: SEQUENCES }];
    let mut cache = ModelCache::new(&backend, &vec![(shape, recipe.clone()); LAYERS], SEQUENCES)?;
    cache.reserve(&budget).await?;

    // Once: the tensors that the engine's kernels write and read; here all layers share them.
    let zeroed = |heads: usize| Tensor::zeroed(stream, SEQUENCES * heads * shape.head_dim(), ElementType::Bf16);
    let (kv, query) = (shape.kv_heads(), shape.query_heads());
    let tensors =
        LayerTensors { keys: zeroed(kv)?, values: zeroed(kv)?, queries: zeroed(query)?, output: zeroed(query)? };
    let rows = RowLayout::token_major(SEQUENCES, &shape);
    let mut steps = ModelStep::new(&backend, rows, vec![tensors.clone(); LAYERS])?;
    steps.prepare(&cache)?;
    let (mut graph, mut captured) = (None::<(u64, CudaGraph, LaunchMemory)>, 0);

    // Every step.
    let runs: Vec<TokenRun> = (0..SEQUENCES).map(TokenRun::decode).collect();
    for token in 0..DECODED {
        for (phase, tensor) in [&tensors.keys, &tensors.values, &tensors.queries].into_iter().enumerate() {
            let rows = wave(tensor.elements(), token, phase);
            tensor.write(stream, rows.as_slice().into())?;
        }
        cache.begin_append(&runs)?;
        let step = steps.write(&cache.open_steps()?)?;
        if graph.as_ref().is_none_or(|(class, ..)| *class != step.class()) {
            stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
            for layer in 0..LAYERS {
                // The engine's kernels before attention.
                step.launch(layer)?;
                // The engine's kernels after it.
            }
            let new = stream.end_capture(CUgraphInstantiate_flags(0))?.ok_or("the driver captured no graph")?;
            graph = Some((step.class(), new, step.memory()));
            captured += 1;
        }
        if let Some((_, graph, _)) = &graph {
            graph.launch()?;
            step.replayed();
        }
        if token + 1 == DECODED {
            // The step is open still: the calls of the cache see what the graph has stored.
            let called = cache.attend(LAYERS - 1, &tensors.queries, ElementType::F32).await?;
            let called: Vec<f64> = called.download(stream)?.into_iter().map(f64::from).collect();
            let error = nmse(&tensors.output.download(stream)?, &called);
            println!("NMSE {error:.1e} against the calls of the cache");
            // The outputs of the graph are rounded to bf16.
            if error > 1e-5 {
                return Err(format!("NMSE {error} against the calls of the cache, at most 1e-5 is expected").into());
            }
        }
        cache.commit()?;
    }
    println!("{captured} graphs for {DECODED} steps, {} tokens in each of {SEQUENCES} sequences", cache.length(0)?);
    for told in cache.non_finite().await? {
        println!("not finite: {told:?}");
    }
    Ok(())
}

/// Stands for the tensors of a model.
fn wave(elements: usize, token: usize, phase: usize) -> Vec<half::bf16> {
    let at = |i: usize| (i as f32 * 0.37 + phase as f32, i as f32 * 0.011 + token as f32 * 0.7);
    (0..elements).map(|i| half::bf16::from_f32(at(i).0.sin() * at(i).1.cos() * 2.0)).collect()
}
