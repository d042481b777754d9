//! Steps through wgpu: one pass and one submission for all layers.

use kvpack::Result;
use kvpack::backend::Device;
use kvpack::cache::{ModelCache, TokenRun};
use kvpack::plan::ElementType;
use kvpack::wgpu::measure::{Clock, Repeats, time};
use kvpack::wgpu::{LayerTensors, ModelStep, Tensor, Wgpu, WrittenStep};
use kvpack_report::Median;

use super::{Measured, ModelEngine, Tensors, TimedModel};

/// Runs of all layers that are timed.
const REPEATS: Repeats = Repeats { warm_up: 3, timed: 15, together: 1 };

/// An engine's tensors and steps.
pub struct Engine {
    backend: Wgpu,
    tensors: LayerTensors,
    steps: ModelStep,
    layers: usize,
}

impl TimedModel for Wgpu {
    type Engine = Engine;

    async fn engine(&self, cache: &ModelCache<Self>, tensors: Tensors<Self>) -> Result<Engine> {
        let Tensors { rows, keys, values, queries } = tensors;
        let output = Tensor::zeroed(self.device(), queries.elements(), ElementType::F32)?;
        let tensors = LayerTensors { keys, values, queries, output };
        let layers = cache.layers();
        let steps = ModelStep::new(self, rows, vec![tensors.clone(); layers])?;
        steps.prepare(cache).await?;
        Ok(Engine { backend: self.clone(), tensors, steps, layers })
    }
}

/// Encodes all layers of a step in one pass, and submits it.
fn submit(backend: &Wgpu, step: &WrittenStep<'_>, layers: usize) -> Result<()> {
    let mut encoder = backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
    for layer in 0..layers {
        step.encode_store(layer, &mut pass)?;
        step.encode_attend(layer, &mut pass)?;
    }
    drop(pass);
    backend.queue().submit([encoder.finish()]);
    Ok(())
}

impl ModelEngine<Wgpu> for Engine {
    fn step(&mut self, cache: &mut ModelCache<Wgpu>, runs: &[TokenRun]) -> Result<bool> {
        cache.begin_append(runs)?;
        let step = self.steps.write(&cache.open_steps()?)?;
        submit(&self.backend, &step, self.layers)?;
        let anew = step.bound_anew();
        cache.commit()?;
        Ok(anew)
    }

    async fn wait(&self) -> Result<()> {
        self.backend.download(&self.tensors.output.slice(0, 4)?).await.map(drop)
    }

    async fn measure(&mut self, cache: &mut ModelCache<Wgpu>, runs: &[TokenRun]) -> Result<Measured> {
        cache.begin_append(runs)?;
        let layers = self.layers;
        let step = self.steps.write(&cache.open_steps()?)?;
        submit(&self.backend, &step, layers)?;
        let output = self.backend.download(&self.tensors.output).await?;
        let store = |pass: &mut wgpu::ComputePass<'_>| (0..layers).try_for_each(|layer| step.encode_store(layer, pass));
        let attend =
            |pass: &mut wgpu::ComputePass<'_>| (0..layers).try_for_each(|layer| step.encode_attend(layer, pass));
        // A layer that is not there cannot be encoded; all are.
        let stored = time(&self.backend, &[&|pass| store(pass).unwrap_or(())], REPEATS).await?;
        let attended = time(&self.backend, &[&|pass| attend(pass).unwrap_or(())], REPEATS).await?;
        let by_gpu = stored.clock == Clock::Gpu && attended.clock == Clock::Gpu;
        let kernels = by_gpu.then(|| [stored, attended].map(|timing| Median::of_durations(&timing.sorted)));
        Ok(Measured { output, kernels })
    }

    fn queries(&self) -> &Tensor {
        &self.tensors.queries
    }
}
