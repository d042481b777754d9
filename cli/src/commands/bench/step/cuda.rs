//! Steps through CUDA: one graph of all layers, replayed.

use std::time::Duration;

use kvpack::backend::Device;
use kvpack::cache::{ModelCache, TokenRun};
use kvpack::cuda::cudarc::driver::sys::CUgraphInstantiate_flags;
use kvpack::cuda::cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
use kvpack::cuda::cudarc::driver::{CudaGraph, DriverError};
use kvpack::cuda::{Cuda, LaunchMemory, LayerTensors, ModelStep, Tensor, WrittenStep, time_launches};
use kvpack::plan::ElementType;
use kvpack::{Error, Result};
use kvpack_report::Median;

use super::{Measured, ModelEngine, Tensors, TimedModel};

/// Steps before those that count, until the device has raised its clock.
const WARM_UP: Duration = Duration::from_millis(100);

/// Replays of a graph of all layers.
const REPLAYS: usize = 30;

/// An engine's tensors, steps and graph.
pub struct Engine {
    backend: Cuda,
    tensors: LayerTensors,
    steps: ModelStep,
    layers: usize,
    graph: Option<(CudaGraph, LaunchMemory)>,
}

impl TimedModel for Cuda {
    type Engine = Engine;

    async fn engine(&self, cache: &ModelCache<Self>, tensors: Tensors<Self>) -> Result<Engine> {
        let Tensors { rows, keys, values, queries } = tensors;
        let output = Tensor::zeroed(self.stream(), queries.elements(), ElementType::F32)?;
        let (layers, tensors) = (cache.layers(), LayerTensors { keys, values, queries, output });
        let steps = ModelStep::new(self, rows, vec![tensors.clone(); layers])?;
        Ok(Engine { backend: self.clone(), tensors, steps, layers, graph: None })
    }
}

fn failed(error: DriverError) -> Error {
    Error::Gpu { message: format!("a graph of a step: {error}") }
}

/// What an engine captures: here its own kernels would be, too.
fn capture(backend: &Cuda, step: &WrittenStep<'_>, layers: usize) -> Result<Option<CudaGraph>> {
    backend.stream().begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(failed)?;
    let launched = (0..layers).try_for_each(|layer| step.launch(layer));
    let graph = backend.stream().end_capture(CUgraphInstantiate_flags(0)).map_err(failed);
    launched?;
    graph
}

/// Replays the graph of a step, captured again where its launches are bound again.
fn replay(
    backend: &Cuda,
    step: &WrittenStep<'_>,
    layers: usize,
    captured: &mut Option<(CudaGraph, LaunchMemory)>,
) -> Result<()> {
    if step.bound_anew() || captured.is_none() {
        *captured = capture(backend, step, layers)?.map(|graph| (graph, step.memory()));
    }
    if let Some((graph, _)) = captured {
        graph.launch().map_err(failed)?;
        step.replayed();
    }
    Ok(())
}

impl ModelEngine<Cuda> for Engine {
    fn step(&mut self, cache: &mut ModelCache<Cuda>, runs: &[TokenRun]) -> Result<bool> {
        cache.begin_append(runs)?;
        let step = self.steps.write(&cache.open_steps()?)?;
        replay(&self.backend, &step, self.layers, &mut self.graph)?;
        let anew = step.bound_anew();
        cache.commit()?;
        Ok(anew)
    }

    async fn wait(&self) -> Result<()> {
        self.backend.stream().synchronize().map_err(failed)
    }

    async fn measure(&mut self, cache: &mut ModelCache<Cuda>, runs: &[TokenRun]) -> Result<Measured> {
        cache.begin_append(runs)?;
        let step = self.steps.write(&cache.open_steps()?)?;
        let time = |launch: &dyn Fn(usize) -> Result<()>| {
            let timing = time_launches(&self.backend, launch, self.layers, WARM_UP, REPLAYS)?;
            let of_all = |time: &Duration| time.as_secs_f64() * self.layers as f64;
            Ok::<_, Error>(Median::of(timing.sorted.iter().map(of_all).collect()))
        };
        replay(&self.backend, &step, self.layers, &mut self.graph)?;
        let output = self.backend.download(&self.tensors.output).await?;
        let kernels = [time(&|layer| step.launch_store(layer))?, time(&|layer| step.launch_attend(layer))?];
        Ok(Measured { output, kernels: Some(kernels) })
    }

    fn queries(&self) -> &Tensor {
        &self.tensors.queries
    }
}
