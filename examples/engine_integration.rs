//! How an inference engine uses kvpack: its own device, its own command encoder, one cache per layer.
//!
//!     cargo run --release --example engine_integration
//!
//! Runs one layer twice, on the GPU and on the CPU backend, and fails if they disagree. `WGPU_ADAPTER_NAME` picks the
//! adapter.

use std::error::Error;

use kvpack::backend::AttendOptions;
use kvpack::backend::Device;
use kvpack::cache::{KvCache, PromptSpan, Recipe};
use kvpack::cpu::{Cpu, nmse};
use kvpack::plan::{ElementType, Elements, QueryRun, RowLayout, TokenRange};
use kvpack::wgpu::{Requirements, Scratch, StepPlan, StepTensors, Tensor, Wgpu, choose_adapter};
use kvpack::{AttentionShape, Backend, Bits};

/// Twelve text tokens, an image of 576, twenty more of text.
const PROMPT: usize = 608;
/// Tokens that are decoded after the prompt.
const DECODED: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    pollster::block_on(run())
}

async fn run() -> Result<(), Box<dyn Error>> {
    // The engine opens its device. What kvpack asks for is merged into what the engine needs.
    let adapter = choose_adapter(None).await?;
    let wanted = Requirements::of(&adapter);
    let (device, queue) = adapter
        .request_device(&wgpu::DeviceDescriptor {
            required_features: wanted.features,
            required_limits: wanted.limits,
            ..Default::default()
        })
        .await?;
    let backend = Wgpu::new(device.clone(), queue.clone())?;
    println!("{}", backend.name());

    let shape = AttentionShape::new(8, 2, 64)?;
    let cache = filled(backend.clone(), shape).await?;
    let twin = filled(Cpu::new(), shape).await?;
    let memory = cache.memory();
    println!("{} tokens, {} bytes on the device", cache.tokens(0)?, memory.allocated_bytes());
    println!("visual tokens: {:.2} bits per element, ranges included", memory.packed()[0].bits_per_element());

    let query = wave(shape.query_heads() * shape.head_dim(), 5.0);
    let on_cpu = twin.backend().upload(Elements::F32(&query)).await?;
    let expected = twin.attend(&on_cpu, ElementType::F32).await?.to_f32();

    // The comfortable way: one call, which submits.
    let queries = Tensor::upload(&device, &queue, Elements::F32(&query)).await?;
    let attended = cache.attend(&queries, ElementType::F32).await?;
    agree("attend", &attended.download(&device, &queue).await?, &expected)?;

    // The engine's way: kvpack plans and encodes into a pass of the engine, which submits when it likes.
    let step = StepPlan::new(
        backend.capabilities(),
        &cache.plan(&[QueryRun::decode(0)])?,
        queries.element_type(),
        AttendOptions::default(),
    )?;
    let scratch = Scratch::new(&device, step.scratch()).await?;
    let output = Tensor::zeroed(&device, query.len(), ElementType::F32)?;
    let tensors = StepTensors { queries: &queries, output: &output, lse: None };
    let launches = step.bind(backend.kernels(), &cache.stores(), &scratch, tensors)?;
    queue.write_buffer(&scratch.tables, 0, step.tables());
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    launches.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
    queue.submit([encoder.finish()]);
    println!("{} launches", launches.len());
    agree("encode", &output.download(&device, &queue).await?, &expected)?;
    Ok(())
}

/// A cache that holds a prompt, its image at 2 bits, and a few decoded tokens.
async fn filled<B: Backend>(backend: B, shape: AttentionShape) -> kvpack::Result<KvCache<B>> {
    let mut cache = KvCache::new(backend, shape, 1, Recipe::calibquant(Bits::Two))?;
    let row = shape.kv_heads() * shape.head_dim();
    let keys = cache.backend().upload(Elements::F32(&wave(PROMPT * row, 1.0))).await?;
    let values = cache.backend().upload(Elements::F32(&wave(PROMPT * row, 2.0))).await?;
    let prompt = [
        PromptSpan::f16(TokenRange::new(0, 12)?),
        PromptSpan::packed(TokenRange::new(12, 588)?),
        PromptSpan::f16(TokenRange::new(588, PROMPT)?),
    ];
    cache.prefill(0, RowLayout::token_major(PROMPT, &shape), &keys, &values, &prompt).await?;
    for token in 0..DECODED {
        let key = cache.backend().upload(Elements::F32(&wave(row, 3.0 + token as f32))).await?;
        let value = cache.backend().upload(Elements::F32(&wave(row, 4.0 + token as f32))).await?;
        cache.append(RowLayout::token_major(1, &shape), &key, &value).await?;
    }
    Ok(cache)
}

/// Stands for the tensors of a model.
fn wave(elements: usize, phase: f32) -> Vec<f32> {
    (0..elements).map(|i| (i as f32 * 0.37 + phase).sin() * (i as f32 * 0.011 + phase).cos() * 2.0).collect()
}

fn agree(what: &str, got: &[f32], expected: &[f32]) -> Result<(), Box<dyn Error>> {
    let expected: Vec<f64> = expected.iter().copied().map(f64::from).collect();
    let error = nmse(got, &expected);
    println!("{what}: NMSE {error:.1e} against the CPU backend");
    // At 2 bits queries have one byte, unless the recipe asks for more.
    if error > 1e-4 {
        return Err(format!("{what}: NMSE {error} against the CPU backend, at most 1e-4 is expected").into());
    }
    Ok(())
}
