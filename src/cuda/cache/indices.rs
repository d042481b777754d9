//! Token numbers on the device, for gathers.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::Result;
use crate::cuda::device::memory::{Memory, bytes_of};
use crate::plan::{IndexShape, TokenIndices};

/// Token numbers `[kv_heads, count]` on the device, one word each. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Indices {
    memory: Arc<Memory>,
    shape: IndexShape,
}

impl Indices {
    /// Zeros for a kernel to overwrite with token numbers below [`IndexShape::below`].
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory); [`Error::Limit`](crate::Error::Limit) for more indices than
    /// memory can hold.
    pub fn zeroed(stream: &Arc<CudaStream>, shape: IndexShape) -> Result<Self> {
        let bytes = bytes_of("token indices", shape.kv_heads(), bytes_of("token indices", shape.count(), 4)?)?;
        Ok(Self { memory: Memory::zeroed(stream, "token indices", bytes)?, shape })
    }

    /// Copies token numbers to the device.
    ///
    /// # Errors
    /// Those of [`IndexShape::of`]; [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn upload(stream: &Arc<CudaStream>, tokens: &[u32], kv_heads: usize, below: u32) -> Result<Self> {
        let shape = IndexShape::of(tokens, kv_heads, below)?;
        Ok(Self { memory: Memory::upload(stream, "token indices", bytemuck::cast_slice(tokens))?, shape })
    }

    /// Copies the indices to the host, after all work queued on the stream.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) on another stream than that of the indices;
    /// [`Error::DeviceLost`](crate::Error::DeviceLost).
    pub fn download(&self, stream: &Arc<CudaStream>) -> Result<Vec<u32>> {
        let bytes = self.memory.download(stream, "token indices")?;
        Ok(bytemuck::pod_collect_to_vec(&bytes))
    }

    /// Address of the first index.
    pub(in crate::cuda) fn address(&self) -> u64 {
        self.memory.address()
    }

    pub(in crate::cuda) const fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

impl TokenIndices for Indices {
    fn shape(&self) -> IndexShape {
        self.shape
    }
}
