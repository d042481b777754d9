//! How an inference engine uses kvpack through wgpu: its own device, its own pass, one cache for all layers.
//!
//!     cargo run --release --example engine_integration
//!
//! A step is one pass and one submission for all layers, without a wait. The same steps run on the CPU, and the example
//! fails where outputs disagree. `WGPU_ADAPTER_NAME` picks the adapter. `engine_graph` is the same on CUDA;
//! docs/engines.md tells what a step costs, and how to size the cache.

use std::error::Error;

use kvpack::backend::Device;
use kvpack::cache::{ModelCache, PromptSpan, Recipe, StoreRoom, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor, nmse};
use kvpack::plan::{ElementType, RowLayout, TokenRange};
use kvpack::wgpu::{LayerTensors, ModelStep, Requirements, Tensor, Wgpu, choose_adapter};
use kvpack::{AttentionShape, Backend, Bits};

const LAYERS: usize = 4;
/// Twelve text tokens, an image of 576, twenty more of text.
const PROMPT: usize = 608;
/// Tokens that are decoded after the prompt.
const DECODED: usize = 150;

fn main() -> Result<(), Box<dyn Error>> {
    pollster::block_on(run())
}

async fn run() -> Result<(), Box<dyn Error>> {
    // The engine opens its device. What kvpack asks for is merged into what the engine needs.
    let adapter = choose_adapter(None).await?;
    // SAFETY: wgpu does not promise that safe calls are sound with experimental features. kvpack uses its cooperative
    // matrices, by which prompts are several times as fast.
    let wanted = Requirements::of(&adapter, unsafe { wgpu::ExperimentalFeatures::enabled() });
    let descriptor = wgpu::DeviceDescriptor {
        required_features: wanted.features,
        required_limits: wanted.limits,
        experimental_features: wanted.experimental,
        ..Default::default()
    };
    let (device, queue) = adapter.request_device(&descriptor).await?;
    let backend = Wgpu::new(device.clone(), queue.clone())?;

    // A cache for all layers, with a budget that it never leaves: pages of 128 tokens, in f16, of prompts at 2 bits,
    // and of full windows at 2 bits.
    let shape = AttentionShape::new(8, 2, 64)?;
    let recipe = Recipe::calibquant(Bits::Two).with_window(0);
    let budget = [(5, 5), (10, 1), (4, 1)].map(|(pages, spans)| StoreRoom { pages, spans });
    let mut cache = ModelCache::new(&backend, &vec![(shape, recipe.clone()); LAYERS], 1)?;
    cache.reserve(&budget).await?;
    prefill(&mut cache).await?;

    // Once: the tensors that the engine's kernels write and read, and every kernel that a step can need.
    let zeroed = |heads: usize| Tensor::zeroed(&device, heads * shape.head_dim(), ElementType::F32);
    let (kv, query) = (shape.kv_heads(), shape.query_heads());
    let of_layer = |_| -> kvpack::Result<LayerTensors> {
        Ok(LayerTensors { keys: zeroed(kv)?, values: zeroed(kv)?, queries: zeroed(query)?, output: zeroed(query)? })
    };
    let tensors = (0..LAYERS).map(of_layer).collect::<kvpack::Result<Vec<_>>>()?;
    let rows = RowLayout::token_major(1, &shape);
    let mut steps = ModelStep::new(&backend, rows, tensors.clone())?;
    steps.prepare(&cache).await?;

    // Every step.
    for token in 0..DECODED {
        cache.begin_append(&[TokenRun::decode(0)])?;
        let step = steps.write(&cache.open_steps()?)?;
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for (layer, tensors) in tensors.iter().enumerate() {
            projections(&queue, tensors, token, layer);
            step.encode_store(layer, &mut pass)?;
            step.encode_attend(layer, &mut pass)?;
        }
        drop(pass);
        queue.submit([encoder.finish()]);
        cache.commit()?;
    }

    println!("{}: {} tokens", backend.name(), cache.length(0)?);
    println!("{:.2} bits per element at 2 bits, ranges included", cache.memory().packed()[0].bits_per_element());
    for told in cache.non_finite().await? {
        println!("not finite: {told:?}");
    }
    let expected = on_cpu(shape, &recipe).await?;
    for (layer, (tensors, expected)) in tensors.iter().zip(&expected).enumerate() {
        let error = nmse(&tensors.output.download(&device, &queue).await?, expected);
        println!("layer {layer}: NMSE {error:.1e} against the CPU backend");
        // At 2 bits queries have one byte, unless the options ask for more.
        if error > 1e-3 {
            return Err(format!("layer {layer}: NMSE {error} against the CPU backend, at most 1e-3 is expected").into());
        }
    }
    Ok(())
}

/// Stands for the engine's kernels before attention, which it would encode into the pass.
fn projections(queue: &wgpu::Queue, tensors: &LayerTensors, token: usize, layer: usize) {
    for (which, tensor) in [&tensors.keys, &tensors.values, &tensors.queries].into_iter().enumerate() {
        let rows = wave(tensor.elements(), token, 3 * layer + which);
        queue.write_buffer(tensor.buffer(), tensor.offset(), bytemuck::cast_slice(&rows));
    }
}

/// The prompt of every layer, its image at 2 bits. Prefill is done by the calls of the cache, which submit
/// for themselves.
async fn prefill<B: Backend>(cache: &mut ModelCache<B>) -> kvpack::Result<()> {
    let prompt = [
        PromptSpan::f16(TokenRange::new(0, 12)?),
        PromptSpan::packed(TokenRange::new(12, 588)?),
        PromptSpan::f16(TokenRange::new(588, PROMPT)?),
    ];
    cache.reserve_for_prefill(&prompt).await?;
    cache.begin_prefill(0, PROMPT, &prompt)?;
    for layer in 0..cache.layers() {
        let shape = *cache.shape(layer)?;
        let elements = PROMPT * shape.kv_heads() * shape.head_dim();
        let keys = cache.backend().upload(wave(elements, 1000, layer).as_slice().into()).await?;
        let values = cache.backend().upload(wave(elements, 2000, layer).as_slice().into()).await?;
        cache.store_prompt(layer, RowLayout::token_major(PROMPT, &shape), &keys, &values, &prompt).await?;
    }
    cache.commit()
}

/// The outputs of the last step by the calls of the cache, on the CPU.
async fn on_cpu(shape: AttentionShape, recipe: &Recipe) -> kvpack::Result<Vec<Vec<f64>>> {
    let mut cache = ModelCache::new(&Cpu::new(), &vec![(shape, recipe.clone()); LAYERS], 1)?;
    prefill(&mut cache).await?;
    let mut outputs = Vec::new();
    for token in 0..DECODED {
        cache.reserve_for_append(&[TokenRun::decode(0)]).await?;
        cache.begin_append(&[TokenRun::decode(0)])?;
        outputs.clear();
        for layer in 0..LAYERS {
            let heads = [shape.kv_heads(), shape.kv_heads(), shape.query_heads()];
            let row = |which: usize| CpuTensor::F32(wave(heads[which] * shape.head_dim(), token, 3 * layer + which));
            cache.store(layer, RowLayout::token_major(1, &shape), &row(0), &row(1)).await?;
            let output = cache.attend(layer, &row(2), ElementType::F32).await?;
            outputs.push(output.to_f32().into_iter().map(f64::from).collect());
        }
        cache.commit()?;
    }
    Ok(outputs)
}

/// Stands for the tensors of a model.
fn wave(elements: usize, token: usize, phase: usize) -> Vec<f32> {
    let at = |i: usize| (i as f32 * 0.37 + phase as f32, i as f32 * 0.011 + token as f32 * 0.7);
    (0..elements).map(|i| at(i).0.sin() * at(i).1.cos() * 2.0).collect()
}
