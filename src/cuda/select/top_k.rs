//! Kernel `top_k`.

use super::launch::{Kernel, Launch, Launches};
use super::{check_index, check_indices, check_output};
use crate::cuda::Cuda;
use crate::cuda::device::indices::Indices;
use crate::cuda::device::program::Program;
use crate::cuda::device::tensor::Tensor;
use crate::cuda::sources::SOURCES;
use crate::plan::{ElementType, IndexShape};
use crate::{Error, Result};

/// Threads of a block, `TOP_THREADS` in its source.
const THREADS: u32 = 1024;

/// Bytes of shared memory that its source declares itself, and a reserve for what every block costs.
const OWN_SHARED_BYTES: usize = 10 << 10;

/// Selects the best scores of every KV head. One launch. The plan decides everything except the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopKPlan {
    /// Scores of each head.
    n: usize,
    /// `[kv_heads, k]`.
    chosen: IndexShape,
}

/// `TopKCall` of `select/top_k.cu`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct TopKCall {
    scores: u64,
    chosen: u64,
    n: u32,
    k: u32,
    held: u32,
    unused: u32,
}

impl TopKPlan {
    /// Plans the selection of the `k` largest of `n` scores for each of `kv_heads` heads. Ties go to the lower index,
    /// −0 equals +0, and NaN ranks below −∞.
    ///
    /// # Errors
    /// [`Error::TopK`] when `k` is larger than `n`; [`Error::NoTokens`] when `k` or the number of heads is 0;
    /// [`Error::Limit`] when there are more heads than a layer has, or more scores than a 32-bit index can count.
    pub fn new(kv_heads: usize, n: usize, k: usize) -> Result<Self> {
        if k > n {
            return Err(Error::TopK { k, n });
        }
        if k == 0 || kv_heads == 0 {
            return Err(Error::NoTokens { what: "top_k", hint: "choose at least one score" });
        }
        check_index("the scores of all heads", kv_heads.saturating_mul(n) as u64)?;
        // If 32 bits count the scores of all heads, they count those of one.
        Ok(Self { n, chosen: IndexShape::new(kv_heads, k, n as u32)? })
    }

    /// The shape of the result.
    pub const fn indices(&self) -> IndexShape {
        self.chosen
    }

    /// Binds the f32 scores to read, `[kv_heads, n]`, and the indices to write, `[kv_heads, k]`,
    /// ascending for each head.
    ///
    /// # Errors
    /// [`Error::Elements`] or [`Error::Buffer`] when a tensor does not fit the plan; errors of the driver.
    pub fn bind(&self, backend: &Cuda, scores: &Tensor, chosen: &Indices) -> Result<Launches> {
        check_output("scores", scores, self.chosen.kv_heads() * self.n, ElementType::F32)?;
        check_indices("chosen indices", chosen, self.chosen.kv_heads(), self.chosen.count())?;
        let facts = backend.kernels().facts();
        let held = self.n.min(facts.shared_bytes.saturating_sub(OWN_SHARED_BYTES) / size_of::<f32>());
        let call = TopKCall {
            scores: scores.address(),
            chosen: chosen.address(),
            n: self.n as u32,
            k: self.chosen.count() as u32,
            held: held as u32,
            unused: 0,
        };
        let program = Program { sources: &SOURCES, files: &["select/top_k.cu"], defines: Vec::new() };
        let shared = held * size_of::<f32>();
        let kernel =
            Kernel { program: &program, name: "top_k", grid: [self.chosen.kv_heads(), 1], block: THREADS, shared };
        let launch = Launch::new(backend, kernel, &call, &[scores.memory(), chosen.memory()])?;
        Ok(Launches::new(vec![launch]))
    }
}
