//! CUDA: tensors of the caller stay where they lie, and work is ordered with the caller's current stream.

use std::sync::{Arc, OnceLock};

use kvpack::backend::Device;
use kvpack::cache::ModelCache;
use kvpack::cuda::cudarc::driver::sys::CUcontext;
use kvpack::cuda::cudarc::driver::sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
use kvpack::cuda::cudarc::driver::sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
use kvpack::cuda::cudarc::driver::{CudaContext, CudaStream, DriverError, result};
use kvpack::cuda::{Cuda, KernelCache, LayerTensors, ModelStep, StepLaunches, Tensor};
use kvpack::plan::{ElementType, RowLayout};
use kvpack::{AttentionShape, Error, Result};
use pyo3::PyResult;
use pyo3::prelude::*;

use crate::errors::{raised, wrong_tensor};
use crate::host::{CallOrder, Host, LayerRows, Prepared};
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
    if !driver_present() {
        let reason = "the CUDA driver (libcuda) was not found; install NVIDIA's driver or use device='cpu'";
        return Err(refuse(reason.into()));
    }
    let context = CudaContext::new(ordinal).map_err(|error| refuse(format!("CUDA device {ordinal}: {error}")))?;
    Cuda::new(stream_of(&context, stream), KernelCache::of_user())
}

/// Whether the driver is there. cudarc panics at the first call if it is missing.
fn driver_present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    *PRESENT.get_or_init(kvpack::cuda::driver_present)
}

/// The context that a thread works in, null if none, which is set back when this is dropped: it is the current device
/// of PyTorch and of the CUDA runtime.
pub struct ThreadContext(Option<CUcontext>);

impl ThreadContext {
    /// An error says that the thread has none: no call has initialised the driver, or it is gone.
    fn current() -> CUcontext {
        result::ctx::get_current().ok().flatten().unwrap_or(std::ptr::null_mut())
    }
}

impl Drop for ThreadContext {
    fn drop(&mut self) {
        if let Some(before) = self.0.filter(|&before| before != Self::current()) {
            // SAFETY: it was current when this was made. It is the caller's, who has not destroyed it during a call.
            // If it cannot be set back, the driver has failed, and the caller's next call says so.
            _ = unsafe { result::ctx::set_current(before) };
        }
    }
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

/// Whether what is freed on a stream would become part of a graph. Where the question fails otherwise, the device has
/// failed and nothing reads the memory, or the process was forked and its driver gives nothing back.
fn forbids_frees(stream: &CudaStream) -> bool {
    match stream.capture_status() {
        Ok(status) => status != CU_STREAM_CAPTURE_STATUS_NONE,
        Err(error) => error.0 == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
    }
}

fn refuse<T>(what: &str, hint: &str) -> Result<T> {
    Err(Error::Unsupported { what: what.into(), hint: hint.into() })
}

/// Orders a stream behind another. A capture allows that of streams outside it with none within.
fn order(stream: &CudaStream, behind: &CudaStream) -> Result<()> {
    if stream.cu_stream() == behind.cu_stream() {
        return Ok(());
    }
    if is_capturing(stream) || is_capturing(behind) {
        let what = "a call on this stream while a CUDA graph is captured on another stream of the cache";
        return refuse(what, "call it on the stream of the capture, or after the capture");
    }
    stream.join(behind).map_err(driver("ordering streams"))
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
            order(&stream, last)?;
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

    type ThreadDevice = ThreadContext;

    const READS_ROWS: bool = false;

    fn thread_device() -> ThreadContext {
        ThreadContext(driver_present().then(ThreadContext::current))
    }

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

    fn enter(&self, state: &mut CudaState, order: CallOrder) -> Result<()> {
        let stream = state.current(self, order.stream)?;
        if is_capturing(&stream) {
            let hint = "a graph can hold store, attend and store_attend of a step whose 'graph' is a number; make \
                        other calls before or after the capture";
            return refuse("this call while a CUDA graph is captured", hint);
        }
        self::order(self.stream(), &stream)
    }

    fn leave(&self, state: &mut CudaState, order: CallOrder) -> Result<()> {
        match &state.last {
            Some(last) if last.cu_stream() != self.stream().cu_stream() => {
                last.join(self.stream()).map_err(driver("ordering streams"))?;
            }
            _ => {}
        }
        if order.foreign { self.stream().synchronize().map_err(driver("waiting for a call")) } else { Ok(()) }
    }

    fn may_free(&self, state: &mut CudaState) -> bool {
        let own = self.stream();
        // The context keeps the error of an earlier drop for its next call. That call is none of those that matter.
        _ = own.context().bind_to_thread();
        let last = state.last.as_ref().filter(|last| last.cu_stream() != own.cu_stream());
        if forbids_frees(own) || last.is_some_and(|last| forbids_frees(last)) {
            return false;
        }
        if let Some(last) = last {
            // Nobody is there to be told of a failure. Where the order fails, the device has failed and nothing reads
            // the memory, or the process was forked and its driver gives nothing back.
            _ = own.join(last);
        }
        true
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
        order: CallOrder,
        launches: &StepLaunches,
        layer: usize,
        rows: &LayerRows<'_>,
    ) -> PyResult<()> {
        let stream = state.current(self, order.stream).map_err(raised)?;
        if order.foreign {
            if is_capturing(&stream) {
                let what = "a tensor of another library than PyTorch while a CUDA graph is captured";
                return refuse(what, "the graph does not keep its memory; pass tensors of PyTorch").map_err(raised);
            }
            self::order(&stream, self.stream()).map_err(raised)?;
        }
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
        // Their library may reuse the memory as soon as the views of the call are dropped.
        let done = if order.foreign { stream.synchronize().map_err(driver("waiting for a call")) } else { Ok(()) };
        launched.and(done).map_err(raised)
    }

    fn take(&self, what: &str, view: &View) -> PyResult<Tensor> {
        view.check_place(what, self.place())?;
        tensor(what, view, view.kept())
    }

    fn take_rows(&self, what: &str, view: &View, _: &RowLayout, _: &AttentionShape) -> PyResult<Tensor> {
        self.take(what, view)
    }

    fn check_output(&self, out: &View, queries: &View, stored: &[View]) -> PyResult<()> {
        let overlaps = |view: &View| view.is_contiguous() && out.overlaps(view);
        let same = out.address == queries.address && out.element == queries.element;
        if overlaps(queries) && !same {
            return Err(wrong_tensor(
                "out",
                "it overlaps a part of the queries; pass the queries themselves or another",
            ));
        }
        if stored.iter().any(overlaps) {
            return Err(wrong_tensor("out", "it overlaps the keys or the values; pass another"));
        }
        Ok(())
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
