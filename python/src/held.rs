//! What a cache of Python holds: a cache on one of the backends, and sequences that left it.

use kvpack::cache::{Budget, ModelCache, SwappedSequence};
use kvpack::cpu::{Cpu, CpuIndices};
use kvpack::{AttentionShape, Error};
use pyo3::prelude::*;

use crate::cache::Shared;
use crate::errors::raised;
use crate::forked::with_threads;
use crate::host::Host;
#[cfg(feature = "cuda")]
use crate::on_device::OnDevice;

/// The cache of a backend.
pub enum Held {
    Cpu(Shared<Cpu>),
    #[cfg(feature = "cuda")]
    Cuda(Shared<kvpack::cuda::Cuda>),
}

/// Calls a method of the cache on its backend.
macro_rules! on_backend {
    ($held:expr, $shared:ident => $call:expr) => {
        match $held {
            Held::Cpu($shared) => $call,
            #[cfg(feature = "cuda")]
            Held::Cuda($shared) => $call,
        }
    };
}

pub(crate) use on_backend;

/// A sequence that ``Cache.swap_out`` took to the host.
#[pyclass(frozen, module = "kvpack")]
pub struct Swapped {
    pub held: HeldSequence,
}

/// A sequence that left the cache of a backend.
pub enum HeldSequence {
    Cpu(SwappedSequence<CpuIndices>),
    #[cfg(feature = "cuda")]
    Cuda(OnDevice<kvpack::cuda::Cuda, SwappedSequence<kvpack::cuda::Indices>>),
}

#[pymethods]
impl Swapped {
    /// Bytes on the host.
    #[getter]
    fn bytes(&self) -> usize {
        match &self.held {
            HeldSequence::Cpu(swapped) => swapped.bytes(),
            #[cfg(feature = "cuda")]
            HeldSequence::Cuda(swapped) => swapped.bytes(),
        }
    }

    fn __len__(&self) -> usize {
        match &self.held {
            HeldSequence::Cpu(swapped) => swapped.length(),
            #[cfg(feature = "cuda")]
            HeldSequence::Cuda(swapped) => swapped.length(),
        }
    }
}

/// Opens a cache on a device.
pub fn open(
    py: Python<'_>,
    device: &str,
    stream: u64,
    kinds: &[(AttentionShape, kvpack::Recipe)],
    shape: AttentionShape,
    sequences: usize,
    budget: Budget,
) -> PyResult<Held> {
    fn shared<B: Host>(
        py: Python<'_>,
        host: B,
        kinds: &[(AttentionShape, kvpack::Recipe)],
        shape: AttentionShape,
        sequences: usize,
        budget: Budget,
    ) -> PyResult<Shared<B>> {
        let cache = py.detach(|| with_threads(|| ModelCache::new(&host, kinds, sequences))).map_err(raised)?;
        Ok(Shared::new(host, cache.with_budget(budget), shape))
    }
    let unsupported = |hint: &'static str| {
        let what = format!("device '{device}'");
        Err(raised(Error::Unsupported { what, hint: hint.into() }))
    };
    match device.split_once(':').unwrap_or((device, "0")) {
        ("cpu", _) => Ok(Held::Cpu(shared(py, Cpu::new(), kinds, shape, sequences, budget)?)),
        #[cfg(feature = "cuda")]
        ("cuda", ordinal) => {
            let _device = <kvpack::cuda::Cuda as Host>::thread_device();
            let host = crate::cuda_host::open(py, ordinal, stream)?;
            Ok(Held::Cuda(shared(py, host, kinds, shape, sequences, budget)?))
        }
        #[cfg(not(feature = "cuda"))]
        ("cuda", _) => {
            let _ = stream;
            unsupported("this wheel was built without the feature cuda; build it with --features cuda, or use 'cpu'")
        }
        _ => unsupported("use 'cpu' or 'cuda:0'"),
    }
}
