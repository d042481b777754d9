//! Arrays of integers that kernels write.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::Result;
use crate::cuda::device::memory::Memory;

/// A dense array of `u32` on the device that kernels write: counts, places among kept tokens.
#[derive(Clone, Debug)]
pub struct Words {
    memory: Arc<Memory>,
}

impl Words {
    /// An array of zeros.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn zeroed(stream: &Arc<CudaStream>, what: &'static str, len: usize) -> Result<Self> {
        Ok(Self { memory: Memory::zeroed(stream, what, len * size_of::<u32>())? })
    }

    /// Copies the words to the host, after the work that the stream holds.
    ///
    /// # Errors
    /// [`Error::DeviceLost`](crate::Error::DeviceLost).
    pub fn download(&self, stream: &Arc<CudaStream>) -> Result<Vec<u32>> {
        Ok(bytemuck::pod_collect_to_vec(&self.memory.download(stream, "words")?))
    }

    pub(super) const fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}
