//! Arrays of integers that kernels write.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::Result;
use crate::cuda::device::memory::{Memory, bytes_of};

/// A dense array of `u32` on the device that kernels write, such as counts or places among kept tokens.
#[derive(Clone, Debug)]
pub struct Words {
    memory: Arc<Memory>,
    len: usize,
}

impl Words {
    /// An array of zeros.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory); [`Error::Limit`](crate::Error::Limit) for more words than
    /// memory can hold.
    pub fn zeroed(stream: &Arc<CudaStream>, what: &'static str, len: usize) -> Result<Self> {
        Ok(Self { memory: Memory::zeroed(stream, what, bytes_of(what, len, size_of::<u32>())?)?, len })
    }

    /// Copies the words to the host, after all work queued on the stream.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) on another stream than that of the words;
    /// [`Error::DeviceLost`](crate::Error::DeviceLost).
    pub fn download(&self, stream: &Arc<CudaStream>) -> Result<Vec<u32>> {
        Ok(bytemuck::pod_collect_to_vec(&self.memory.download(stream, "words")?))
    }

    /// Number of words.
    pub(in crate::cuda) const fn len(&self) -> usize {
        self.len
    }

    pub(in crate::cuda) const fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}
