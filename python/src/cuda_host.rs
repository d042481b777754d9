//! CUDA: tensors of the caller stay where they lie, and work goes to the caller's stream.

use std::sync::Arc;

use kvpack::backend::Device;
use kvpack::cuda::cudarc::driver::{CudaContext, result};
use kvpack::cuda::{Cuda, KernelCache, Tensor};
use kvpack::{Error, Result};
use pyo3::PyResult;
use pyo3::prelude::*;

use crate::errors::{raised, wrong_tensor};
use crate::host::Host;
use crate::view::{Place, View};

/// The backend on a stream of the caller, by its handle; 0 is the default stream.
pub fn open(ordinal: &str, stream: u64) -> Result<Cuda> {
    let refuse = |reason: String| Error::Adapter { reason };
    let ordinal: usize =
        ordinal.parse().map_err(|_| refuse(format!("'cuda:{ordinal}' is no device; use cuda:0 and so on")))?;
    // cudarc panics at the first call if the driver is missing.
    if !kvpack::cuda::driver_present() {
        let reason = "the CUDA driver (libcuda) was not found; install NVIDIA's driver or use device='cpu'";
        return Err(refuse(reason.into()));
    }
    let context = CudaContext::new(ordinal).map_err(|error| refuse(format!("CUDA device {ordinal}: {error}")))?;
    let stream = match stream {
        0 => context.default_stream(),
        // SAFETY: the caller promises that it is a stream of this device's primary context, and that it lives as long
        // as the cache. PyTorch's streams live as long as the process.
        stream => unsafe { context.wrap_borrowed_stream(stream as _) },
    };
    Cuda::new(stream, KernelCache::of_user())
}

/// Keeps a tensor of Python alive until the library has let go of it.
struct Owner(#[expect(dead_code, reason = "dropping it is its use")] Py<PyAny>);

impl Host for Cuda {
    fn place(&self) -> Place {
        Place::Cuda(self.stream().context().ordinal() as i32)
    }

    fn stream_handle(&self) -> Option<u64> {
        Some(self.stream().cu_stream() as u64)
    }

    fn take(&self, what: &str, view: &View) -> PyResult<Tensor> {
        view.check_place(what, self.place())?;
        if !view.is_contiguous() {
            let reason = format!("its strides are {:?}; on CUDA it must be contiguous", view.strides);
            return Err(wrong_tensor(what, reason));
        }
        let owner = Python::attach(|py| Arc::new(Owner(view.owner.clone_ref(py))));
        // SAFETY: the owner keeps the elements, which a contiguous view has. Frameworks reuse memory in the order of
        // the stream that it was allocated on, which is the backend's.
        unsafe { Tensor::from_address(owner, view.address as u64, view.elements(), view.element) }.map_err(raised)
    }

    fn output(&self, view: &View) -> PyResult<Tensor> {
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
