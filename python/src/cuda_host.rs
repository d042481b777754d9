//! CUDA: tensors of the caller stay where they lie, and work is ordered with the caller's current stream.

use std::sync::Arc;

use kvpack::backend::Device;
use kvpack::cache::ModelCache;
use kvpack::cuda::cudarc::driver::sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
use kvpack::cuda::cudarc::driver::{CudaContext, CudaStream, DriverError, result};
use kvpack::cuda::{Cuda, KernelCache, LayerTensors, ModelStep, StepLaunches, Tensor};
use kvpack::plan::{ElementType, RowLayout};
use kvpack::{AttentionShape, Error, Result};
use pyo3::PyResult;
use pyo3::prelude::*;

use crate::errors::{raised, wrong_tensor};
use crate::host::{Host, LayerRows, Prepared};
use crate::torch::Torch;
use crate::view::{Place, View};

/// Rows of the largest step whose layers are launched without an upload: what a batch decodes, or a draft.
const PREPARED_ROWS: usize = 256;

/// Kinds of steps whose resources are kept, for batches that alternate between sizes.
const KINDS_OF_STEPS: usize = 8;

/// The backend on a stream of the caller, by its handle; 0 is the default stream.
pub fn open(py: Python<'_>, ordinal: &str, stream: u64) -> PyResult<Cuda> {
    // NVRTC of PyTorch's wheel, if there is one: the loader then finds it by its name.
    py.import("kvpack._nvrtc")?.call_method0("load")?;
    py.detach(|| opened(ordinal, stream)).map_err(raised)
}

fn opened(ordinal: &str, stream: u64) -> Result<Cuda> {
    let refuse = |reason: String| Error::Adapter { reason };
    let ordinal: usize =
        ordinal.parse().map_err(|_| refuse(format!("'cuda:{ordinal}' is no device; use cuda:0 and so on")))?;
    // cudarc panics at the first call if the driver is missing.
    if !kvpack::cuda::driver_present() {
        let reason = "the CUDA driver (libcuda) was not found; install NVIDIA's driver or use device='cpu'";
        return Err(refuse(reason.into()));
    }
    let context = CudaContext::new(ordinal).map_err(|error| refuse(format!("CUDA device {ordinal}: {error}")))?;
    Cuda::new(stream_of(&context, stream), KernelCache::of_user())
}

fn stream_of(context: &Arc<CudaContext>, handle: u64) -> Arc<CudaStream> {
    match handle {
        0 => context.default_stream(),
        // SAFETY: it is a stream of this device's primary context, from the caller or from PyTorch, whose streams live
        // as long as the process. The caller promises that its own streams live as long as the cache: the one that it
        // names, and those that it makes PyTorch's current one.
        handle => unsafe { context.wrap_borrowed_stream(handle as _) },
    }
}

fn driver(what: &'static str) -> impl Fn(DriverError) -> Error {
    move |error| Error::Gpu { message: format!("{what}: {error}") }
}

/// Whether a graph captures a stream. The driver refuses the question for the default stream during a capture.
fn is_capturing(stream: &CudaStream) -> bool {
    stream.capture_status() != Ok(CU_STREAM_CAPTURE_STATUS_NONE)
}

/// The streams that a cache was called on, and the steps of its layers.
pub struct CudaState {
    /// The stream of the last call. What the cache has queued is complete when this stream is.
    last: Option<Arc<CudaStream>>,
    steps: Option<ModelStep>,
}

impl CudaState {
    /// The caller's current stream, ordered behind the work of the calls before. A stream that a graph captures is not:
    /// its work runs when the graph is replayed.
    fn current(&mut self, backend: &Cuda, current: u64) -> Result<Arc<CudaStream>> {
        let last = self.last.get_or_insert_with(|| backend.stream().clone());
        if last.cu_stream() as u64 == current {
            return Ok(last.clone());
        }
        let stream = stream_of(backend.stream().context(), current);
        if !is_capturing(&stream) {
            stream.join(last).map_err(driver("ordering streams"))?;
            *last = stream.clone();
        }
        Ok(stream)
    }
}

/// The elements of a contiguous view.
fn tensor(what: &str, view: &View, owner: Arc<dyn std::any::Any + Send + Sync>) -> PyResult<Tensor> {
    if !view.is_contiguous() {
        let reason = format!("its strides are {:?}; on CUDA it must be contiguous", view.strides);
        return Err(wrong_tensor(what, reason));
    }
    // SAFETY: the owner keeps the elements, which a contiguous view has. Frameworks reuse memory in the order of the
    // stream that it was allocated on, which the work of the call is ordered with.
    unsafe { Tensor::from_address(owner, view.address as u64, view.elements(), view.element) }.map_err(raised)
}

impl Host for Cuda {
    type State = CudaState;
    type Prepared = StepLaunches;

    const READS_ROWS: bool = false;

    fn place(&self) -> Place {
        Place::Cuda(self.stream().context().ordinal() as i32)
    }

    fn stream_handle(&self) -> Option<u64> {
        Some(self.stream().cu_stream() as u64)
    }

    fn state(&self) -> CudaState {
        CudaState { last: None, steps: None }
    }

    fn current_stream(&self, py: Python<'_>) -> u64 {
        let ordinal = self.stream().context().ordinal() as i32;
        let torch = Torch::imported(py).and_then(|torch| torch.current_stream(py, ordinal));
        torch.unwrap_or(self.stream().cu_stream() as u64)
    }

    fn enter(&self, state: &mut CudaState, current: u64) -> Result<()> {
        let stream = state.current(self, current)?;
        if is_capturing(&stream) {
            let what =
                "a CUDA graph is captured: it can hold store, attend and store_attend of a step whose 'graph' is \
                        a number, and none of this"
                    .into();
            return Err(Error::Unsupported { what, hint: "call it before or after the capture".into() });
        }
        if stream.cu_stream() != self.stream().cu_stream() {
            self.stream().join(&stream).map_err(driver("ordering streams"))?;
        }
        Ok(())
    }

    fn leave(&self, state: &mut CudaState) -> Result<()> {
        match &state.last {
            Some(last) if last.cu_stream() != self.stream().cu_stream() => {
                last.join(self.stream()).map_err(driver("ordering streams"))
            }
            _ => Ok(()),
        }
    }

    /// A stream that a graph captures takes no such order: it would become part of the graph, or end the capture.
    fn before_drop(&self, state: &mut CudaState) {
        let Some(last) = state.last.take().filter(|last| last.cu_stream() != self.stream().cu_stream()) else { return };
        // The context keeps the error of an earlier drop for its next call. That call is none of those that matter.
        _ = self.stream().context().bind_to_thread();
        if !is_capturing(self.stream()) && !is_capturing(&last) {
            // Nobody is there to be told of a failure. Where the order fails, the device has failed and nothing reads
            // the memory, or the process was forked and its driver gives nothing back.
            _ = self.stream().join(&last);
        }
    }

    fn prepare(&self, state: &mut CudaState, cache: &ModelCache<Self>, longest: usize) -> Result<()> {
        self.steps(state, cache)?.prepare_chunks(cache, longest)
    }

    fn prepared(
        &self,
        state: &mut CudaState,
        cache: &ModelCache<Self>,
        rows: usize,
    ) -> Result<Option<Prepared<StepLaunches>>> {
        if rows > PREPARED_ROWS {
            return Ok(None);
        }
        let open = cache.open_steps()?;
        if open.iter().any(|part| !part.staged.is_empty()) {
            return Ok(None);
        }
        let written = self.steps(state, cache)?.write(&open)?;
        Ok(written.launches().ok().map(|launches| Prepared {
            launches,
            class: written.class(),
            bound_anew: written.bound_anew(),
        }))
    }

    fn launch(
        &self,
        state: &mut CudaState,
        current: u64,
        launches: &StepLaunches,
        layer: usize,
        rows: &LayerRows<'_>,
    ) -> PyResult<()> {
        let stream = state.current(self, current).map_err(raised)?;
        // The caller holds the tensors during the call, and their memory is reused in the order of its stream.
        let of = |(what, view): (&str, &View)| tensor(what, view, Arc::new(()));
        let launched = match rows {
            LayerRows::Store { keys, values } => {
                launches.store(&stream, layer, &of(("keys", keys))?, &of(("values", values))?)
            }
            LayerRows::Attend { queries, out } => {
                launches.attend(&stream, layer, &of(("queries", queries))?, &of(("out", out))?)
            }
            LayerRows::Both { keys, values, queries, out } => {
                let (keys, values) = (of(("keys", keys))?, of(("values", values))?);
                let (queries, output) = (of(("queries", queries))?, of(("out", out))?);
                launches.store_and_attend(&stream, layer, &LayerTensors { keys, values, queries, output })
            }
        };
        launched.map_err(raised)
    }

    fn take(&self, what: &str, view: &View) -> PyResult<Tensor> {
        view.check_place(what, self.place())?;
        tensor(what, view, view.kept())
    }

    fn take_rows(&self, what: &str, view: &View, _: &RowLayout, _: &AttentionShape) -> PyResult<Tensor> {
        self.take(what, view)
    }

    fn output(&self, view: &View, _: &View) -> PyResult<Tensor> {
        self.take("out", view)
    }

    fn give(&self, _: &Tensor, _: &View) -> PyResult<()> {
        Ok(()) // the kernels wrote to the caller's memory
    }

    fn copy(&self, from: &Tensor, view: &View) -> PyResult<()> {
        let to = self.take("result", view)?;
        if self.elements(from) != view.elements() {
            return Err(wrong_tensor("result", "it has another number of elements than its tensor"));
        }
        let bytes = view.elements() * view.element.bytes();
        let stream = self.stream();
        // SAFETY: both tensors have as many f32 elements, and live until the copy is queued; their memory is given back
        // in the order of this stream.
        unsafe { result::memcpy_dtod_async(to.address(), from.address(), bytes, stream.cu_stream()) }
            .map_err(|error| crate::errors::Error::new_err(format!("copying a result on the device: {error}")))
    }
}

/// Steps of a cache, and what its layers are bound to until a layer runs with tensors of its own.
trait Steps {
    fn steps<'a>(&self, state: &'a mut CudaState, cache: &ModelCache<Cuda>) -> Result<&'a mut ModelStep>;
}

impl Steps for Cuda {
    fn steps<'a>(&self, state: &'a mut CudaState, cache: &ModelCache<Cuda>) -> Result<&'a mut ModelStep> {
        let steps = match state.steps.take() {
            Some(steps) => steps,
            None => {
                let shape: &AttentionShape = cache.shape(0)?;
                let zeroed = |heads: usize| {
                    Tensor::zeroed(self.stream(), PREPARED_ROWS * heads * shape.head_dim(), ElementType::F16)
                };
                let (keys, output) = (zeroed(shape.kv_heads())?, zeroed(shape.query_heads())?);
                let of = LayerTensors { values: keys.clone(), keys, queries: output.clone(), output };
                let rows = RowLayout::token_major(PREPARED_ROWS, shape);
                ModelStep::new(self, rows, vec![of; cache.layers()])?.keeping(KINDS_OF_STEPS)
            }
        };
        Ok(state.steps.insert(steps))
    }
}
