//! Kernel `evicted`.

use super::check_indices;
use super::launch::{Kernel, Launch, Launches};
use crate::Result;
use crate::cuda::Cuda;
use crate::cuda::device::indices::Indices;
use crate::cuda::device::program::Program;
use crate::cuda::sources::SOURCES;
use crate::plan::IndexShape;

/// Threads of a block.
const THREADS: u32 = 256;

/// Lists the tokens of every KV head that are not kept. One launch. The plan decides everything except the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvictedPlan {
    kept: IndexShape,
    evicted: IndexShape,
}

/// `EvictedCall` of `select/evicted.cu`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct EvictedCall {
    kept: u64,
    evicted: u64,
    tokens: u32,
    count: u32,
}

impl EvictedPlan {
    /// Plans the complement of kept tokens among those below [`IndexShape::below`].
    ///
    /// # Errors
    /// [`Error::NoTokens`](crate::Error::NoTokens) when nothing is evicted.
    pub fn new(kept: IndexShape) -> Result<Self> {
        Ok(Self { kept, evicted: kept.others()? })
    }

    /// The shape of the result.
    pub const fn indices(&self) -> IndexShape {
        self.evicted
    }

    /// Binds the kept tokens to read, `[kv_heads, kept]`, ascending in each head, and the evicted tokens to write.
    ///
    /// # Errors
    /// [`Error::Elements`](crate::Error::Elements) when the indices have other shapes; errors of the driver.
    pub fn bind(&self, backend: &Cuda, kept: &Indices, evicted: &Indices) -> Result<Launches> {
        let heads = self.kept.kv_heads();
        check_indices("positions of kept tokens", kept, heads, self.kept.count())?;
        check_indices("positions of evicted tokens", evicted, heads, self.evicted.count())?;
        let (tokens, count) = (self.kept.below(), self.kept.count() as u32);
        let call = EvictedCall { kept: kept.address(), evicted: evicted.address(), tokens, count };
        let program = Program { sources: &SOURCES, files: &["select/evicted.cu"], defines: Vec::new() };
        let grid = [(tokens as usize).div_ceil(THREADS as usize), heads];
        let kernel = Kernel { program: &program, name: "evicted", grid, block: THREADS, shared: 0 };
        Ok(Launches::new(vec![Launch::new(backend, kernel, &call, &[kept.memory(), evicted.memory()])?]))
    }
}
