//! Backends: how each takes the tensors of the caller, and gives results back.

use std::convert::Infallible;

use half::{bf16, f16};
use kvpack::backend::Backend;
use kvpack::cache::ModelCache;
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{ElementType, Elements, RowLayout};
use kvpack::{AttentionShape, Result};
use pyo3::prelude::*;
use smallvec::{SmallVec, smallvec};

use crate::errors::{raised, wrong_tensor};
use crate::view::{Place, View};

/// A step whose tables are on the device: its layers are launched without an upload or an allocation.
pub struct Prepared<L> {
    /// The launches. They keep alive what a graph of them reads and writes.
    pub launches: L,
    /// Steps of the same number have the same launches.
    pub class: u64,
    /// Whether memory was bound again. A graph of this class must then be captured again.
    pub bound_anew: bool,
}

/// The tensors of one call of a layer.
pub enum LayerRows<'a> {
    Store { keys: &'a View, values: &'a View },
    Attend { queries: &'a View, out: &'a View },
    Both { keys: &'a View, values: &'a View, queries: &'a View, out: &'a View },
}

impl LayerRows<'_> {
    pub const fn stores(&self) -> bool {
        !matches!(self, Self::Attend { .. })
    }

    pub fn views(&self) -> SmallVec<[&View; 4]> {
        match *self {
            Self::Store { keys, values } => smallvec![keys, values],
            Self::Attend { queries, out } => smallvec![queries, out],
            Self::Both { keys, values, queries, out } => smallvec![keys, values, queries, out],
        }
    }
}

/// The order of a call and of the caller's work.
#[derive(Clone, Copy)]
pub struct CallOrder {
    /// The handle of the stream that the caller works on.
    pub stream: u64,
    /// Whether tensors of another library than PyTorch are among those of the call. Their contents are ordered on the
    /// backend's stream, and their memory may be reused as soon as the call returns.
    pub foreign: bool,
}

/// A backend that the module has.
pub trait Host:
    Backend<Tensor: Send + Sync, Indices: Send + Sync, Store: Send + Sync, NonFiniteFlags: Send + Sync>
    + Clone
    + Send
    + Sync
    + 'static
{
    /// What a cache keeps of streams and steps.
    type State: Send;
    /// The launches of a prepared step.
    type Prepared: Clone + Send + Sync + 'static;

    /// Sets the thread's current device back when it is dropped.
    type ThreadDevice;

    /// Remembers the thread's current device. Calls of the backend, and drops of what lies on it, bind another.
    fn thread_device() -> Self::ThreadDevice;

    /// Where its tensors lie.
    fn place(&self) -> Place;

    /// The state of a new cache.
    fn state(&self) -> Self::State;

    /// The handle of the stream that the caller works on now.
    fn current_stream(&self, py: Python<'_>) -> u64;

    /// Orders the backend's stream behind the caller's current one.
    fn enter(&self, state: &mut Self::State, order: CallOrder) -> Result<()>;

    /// Orders the caller's stream of `enter` behind the backend's. Waits for the work where tensors may be reused at
    /// once.
    fn leave(&self, state: &mut Self::State, order: CallOrder) -> Result<()>;

    /// Orders the backend's stream behind all work of a cache that is dropped: its memory is given back in the order of
    /// that stream. False where a graph captures one of the streams: the memory must not be given back then.
    fn may_free(&self, state: &mut Self::State) -> bool;

    /// Compiles what steps of up to `longest` tokens of a sequence need.
    fn prepare(&self, state: &mut Self::State, cache: &ModelCache<Self>, longest: usize) -> Result<()>;

    /// Prepares the open step of a cache, if its layers can be launched without more.
    fn prepared(
        &self,
        state: &mut Self::State,
        cache: &ModelCache<Self>,
        rows: usize,
    ) -> Result<Option<Prepared<Self::Prepared>>>;

    /// Launches a layer of a prepared step on the caller's current stream.
    fn launch(
        &self,
        state: &mut Self::State,
        order: CallOrder,
        launches: &Self::Prepared,
        layer: usize,
        rows: &LayerRows<'_>,
    ) -> PyResult<()>;

    /// The stream that producers of tensors have to order their work before; none on the host.
    fn stream_handle(&self) -> Option<u64>;

    /// A tensor of the caller with its elements one after the other.
    fn take(&self, what: &str, view: &View) -> PyResult<Self::Tensor>;

    /// Whether it reads keys and values that are not contiguous.
    const READS_ROWS: bool;

    /// Rows `[tokens, kv_heads, head_dim]` of the caller where they lie, in this layout.
    fn take_rows(&self, what: &str, view: &View, rows: &RowLayout, shape: &AttentionShape) -> PyResult<Self::Tensor>;

    /// Checks that an output may be written while the queries and what is stored are read.
    fn check_output(&self, out: &View, queries: &View, stored: &[View]) -> PyResult<()>;

    /// A tensor that a result of this input is written to. The caller checked it.
    fn output(&self, view: &View, input: &View) -> PyResult<Self::Tensor>;

    /// Finishes an output. On the CPU one that overlaps its input is written only now.
    fn give(&self, output: &Self::Tensor, view: &View) -> PyResult<()>;

    /// Copies a result to a new tensor of the caller's library.
    fn copy(&self, result: &Self::Tensor, view: &View) -> PyResult<()>;
}

impl Host for Cpu {
    type State = ();
    type Prepared = Infallible;

    type ThreadDevice = ();

    const READS_ROWS: bool = true;

    fn thread_device() {}

    fn state(&self) {}

    fn current_stream(&self, _: Python<'_>) -> u64 {
        0
    }

    fn enter(&self, (): &mut (), _: CallOrder) -> Result<()> {
        Ok(())
    }

    fn leave(&self, (): &mut (), _: CallOrder) -> Result<()> {
        Ok(())
    }

    fn may_free(&self, (): &mut ()) -> bool {
        true
    }

    fn prepare(&self, (): &mut (), _: &ModelCache<Self>, _: usize) -> Result<()> {
        Ok(())
    }

    fn prepared(&self, (): &mut (), _: &ModelCache<Self>, _: usize) -> Result<Option<Prepared<Infallible>>> {
        Ok(None)
    }

    fn launch(&self, (): &mut (), _: CallOrder, never: &Infallible, _: usize, _: &LayerRows<'_>) -> PyResult<()> {
        match *never {}
    }

    fn place(&self) -> Place {
        Place::Cpu
    }

    fn stream_handle(&self) -> Option<u64> {
        None
    }

    /// Contiguous tensors are read where they lie. Others are copied while the interpreter is held.
    fn take(&self, what: &str, view: &View) -> PyResult<CpuTensor> {
        view.check_place(what, Place::Cpu)?;
        if view.is_contiguous() && view.elements() > 0 {
            return in_place(view.elements(), view);
        }
        Ok(match view.element {
            ElementType::F32 => CpuTensor::F32(copied(what, view)?),
            ElementType::F16 => CpuTensor::F16(copied::<f16>(what, view)?),
            ElementType::Bf16 => CpuTensor::Bf16(copied::<bf16>(what, view)?),
        })
    }

    fn take_rows(&self, what: &str, view: &View, rows: &RowLayout, shape: &AttentionShape) -> PyResult<CpuTensor> {
        view.check_place(what, Place::Cpu)?;
        in_place(rows.elements_needed(shape), view)
    }

    /// `output` makes another tensor where they overlap.
    fn check_output(&self, _: &View, _: &View, _: &[View]) -> PyResult<()> {
        Ok(())
    }

    fn output(&self, view: &View, input: &View) -> PyResult<CpuTensor> {
        if view.elements() > 0 && !view.overlaps(input) {
            return in_place(view.elements(), view);
        }
        Ok(CpuTensor::from_f32(vec![0.0; view.elements()], view.element))
    }

    fn give(&self, output: &CpuTensor, view: &View) -> PyResult<()> {
        match (output, output.elements(), view.element) {
            (CpuTensor::Foreign(_), ..) => Ok(()),
            (_, Elements::F32(x), ElementType::F32) => written(x, view),
            (_, Elements::F16(x), ElementType::F16) => written(x, view),
            (_, Elements::Bf16(x), ElementType::Bf16) => written(x, view),
            _ => Err(wrong_tensor("out", "it has another element type than the result")),
        }
    }

    fn copy(&self, result: &CpuTensor, view: &View) -> PyResult<()> {
        self.give(result, view)
    }
}

/// Elements of the caller, where they lie.
fn in_place(elements: usize, view: &View) -> PyResult<CpuTensor> {
    // SAFETY: the owner keeps this number of elements. Callers are told not to write the tensors of a running call.
    // NumPy and PyTorch compute without the interpreter's lock under the same condition. Outputs overlap no input.
    unsafe { CpuTensor::from_address(view.kept(), view.address, elements, view.element) }.map_err(raised)
}

/// The elements of a tensor on the host, in the order of its dimensions. A tensor of strides of 0 may have more of them
/// than there is memory.
fn copied<T: Copy>(what: &str, view: &View) -> PyResult<Vec<T>> {
    let (elements, mut all) = (view.elements(), Vec::new());
    all.try_reserve_exact(elements)
        .map_err(|_| wrong_tensor(what, format!("there is no memory for a copy of its {elements} elements")))?;
    view.runs(|address, elements| {
        // SAFETY: the owner of the view keeps these elements, of this type and alignment, and the interpreter is held.
        all.extend_from_slice(unsafe { std::slice::from_raw_parts(address as *const T, elements) });
    });
    Ok(all)
}

/// Writes a result to a new tensor of the caller, or to one that overlaps an input.
pub fn written<T: Copy>(from: &[T], view: &View) -> PyResult<()> {
    if from.len() != view.elements() {
        return Err(wrong_tensor("out", format!("it has {} elements; the result has {}", view.elements(), from.len())));
    }
    // SAFETY: the view is contiguous, writable and has as many elements, and the interpreter is held.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), view.address as *mut T, from.len()) };
    Ok(())
}
