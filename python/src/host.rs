//! Backends: how each takes the tensors of the caller, and gives results back.

use half::{bf16, f16};
use kvpack::backend::Backend;
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{ElementType, Elements};
use pyo3::PyResult;

use crate::errors::wrong_tensor;
use crate::view::{Place, View};

/// A backend that the module has.
pub trait Host:
    Backend<Tensor: Send + Sync, Indices: Send + Sync, Store: Send + Sync, NonFiniteFlags: Send + Sync>
    + Clone
    + Send
    + Sync
    + 'static
{
    /// Where its tensors lie.
    fn place(&self) -> Place;

    /// The stream that producers of tensors have to order their work before; none on the host.
    fn stream_handle(&self) -> Option<u64>;

    /// A tensor of the caller with its elements one after the other.
    fn take(&self, what: &str, view: &View) -> PyResult<Self::Tensor>;

    /// A tensor that a result is written to. The caller checked it.
    fn output(&self, view: &View) -> PyResult<Self::Tensor>;

    /// Finishes an output: the CPU copies it to the caller's memory.
    fn give(&self, output: &Self::Tensor, view: &View) -> PyResult<()>;

    /// Copies a result to a new tensor of the caller's library.
    fn copy(&self, result: &Self::Tensor, view: &View) -> PyResult<()>;
}

impl Host for Cpu {
    fn place(&self) -> Place {
        Place::Cpu
    }

    fn stream_handle(&self) -> Option<u64> {
        None
    }

    /// Copies while the interpreter is held: what other threads do with the memory later changes nothing.
    fn take(&self, what: &str, view: &View) -> PyResult<CpuTensor> {
        view.check_place(what, Place::Cpu)?;
        Ok(match view.element {
            ElementType::F32 => CpuTensor::F32(copied(what, view)?),
            ElementType::F16 => CpuTensor::F16(copied::<f16>(what, view)?),
            ElementType::Bf16 => CpuTensor::Bf16(copied::<bf16>(what, view)?),
        })
    }

    fn output(&self, view: &View) -> PyResult<CpuTensor> {
        let elements = view.elements();
        Ok(match view.element {
            ElementType::F32 => CpuTensor::F32(vec![0.0; elements]),
            ElementType::F16 => CpuTensor::F16(vec![f16::ZERO; elements]),
            ElementType::Bf16 => CpuTensor::Bf16(vec![bf16::ZERO; elements]),
        })
    }

    fn give(&self, output: &CpuTensor, view: &View) -> PyResult<()> {
        match (output.elements(), view.element) {
            (Elements::F32(x), ElementType::F32) => written(x, view),
            (Elements::F16(x), ElementType::F16) => written(x, view),
            (Elements::Bf16(x), ElementType::Bf16) => written(x, view),
            _ => Err(wrong_tensor("out", "it has another element type than the result")),
        }
    }

    fn copy(&self, result: &CpuTensor, view: &View) -> PyResult<()> {
        self.give(result, view)
    }
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

fn written<T: Copy>(from: &[T], view: &View) -> PyResult<()> {
    if from.len() != view.elements() {
        return Err(wrong_tensor("out", format!("it has {} elements; the result has {}", view.elements(), from.len())));
    }
    // SAFETY: the view is contiguous, writable and has as many elements, and the interpreter is held.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), view.address as *mut T, from.len()) };
    Ok(())
}
