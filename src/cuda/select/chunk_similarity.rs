//! Kernel `chunk_similarity`.

use super::launch::{Kernel, Launch, Launches};
use super::{check_index, check_output};
use crate::cuda::Cuda;
use crate::cuda::device::program::Program;
use crate::cuda::device::tensor::Tensor;
use crate::cuda::sources::SOURCES;
use crate::plan::ElementType;
use crate::policy::check_widths;
use crate::{Error, Result};

/// Threads of a block, a warp for each chunk.
const THREADS: u32 = 256;

/// Cosine similarities between a query's embedding and chunk embeddings, for engines whose embeddings are on the
/// device. One launch. The plan decides everything except the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSimilarityPlan {
    width: usize,
    chunks: usize,
}

/// `SimilarityCall` of `select/chunk_similarity.cu`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct SimilarityCall {
    query: u64,
    chunks: u64,
    similarities: u64,
    query_type: u32,
    chunk_type: u32,
    width: u32,
    count: u32,
}

impl ChunkSimilarityPlan {
    /// Plans the comparison of `chunks` embeddings of `width` elements.
    ///
    /// # Errors
    /// [`Error::Chunks`] when there are no chunks or their width is 0; [`Error::Limit`] when there are more elements
    /// than a 32-bit index can count.
    pub fn new(width: usize, chunks: usize) -> Result<Self> {
        let elements = width.saturating_mul(chunks);
        check_index("the elements of all embeddings", elements as u64)?;
        check_widths(width, elements)?;
        if chunks == 0 {
            return Err(Error::Chunks { reason: "there are no embeddings to compare".into() });
        }
        Ok(Self { width, chunks })
    }

    /// Binds the embedding of the query, `[width]`, those of the chunks, `[chunks, width]`, and the f32 similarities to
    /// write, `[chunks]`.
    ///
    /// # Errors
    /// [`Error::Chunks`] when the embeddings have another width; [`Error::Elements`] or [`Error::Buffer`] when the
    /// output does not fit the plan; errors of the driver.
    pub fn bind(&self, backend: &Cuda, query: &Tensor, chunks: &Tensor, similarities: &Tensor) -> Result<Launches> {
        if query.elements() != self.width || chunks.elements() != self.width * self.chunks {
            let reason = format!(
                "embeddings of {} and {} elements; the plan is for {} chunks of width {}",
                query.elements(),
                chunks.elements(),
                self.chunks,
                self.width
            );
            return Err(Error::Chunks { reason });
        }
        check_output("similarities of chunks", similarities, self.chunks, ElementType::F32)?;
        let call = SimilarityCall {
            query: query.address(),
            chunks: chunks.address(),
            similarities: similarities.address(),
            query_type: query.type_code(),
            chunk_type: chunks.type_code(),
            width: self.width as u32,
            count: self.chunks as u32,
        };
        let program = Program { sources: &SOURCES, files: &["select/chunk_similarity.cu"], defines: Vec::new() };
        let grid = [(self.chunks * 32).div_ceil(THREADS as usize), 1];
        let kernel = Kernel { program: &program, name: "chunk_similarity", grid, block: THREADS, shared: 0 };
        let memory = [query.memory(), chunks.memory(), similarities.memory()];
        Ok(Launches::new(vec![Launch::new(backend, kernel, &call, &memory)?]))
    }
}
