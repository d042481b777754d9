//! Kernel `chunk_similarity`.

use super::{check_index, check_output, queries_file};
use crate::Result;
use crate::plan::ElementType;
use crate::policy::check_widths;
use crate::wgpu::device::launch::{FLAT_WORKGROUP, Launches, flat_grid};
use crate::wgpu::device::{Kernels, Tensor, Variant};
use crate::wgpu::pack::rows_file;
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;

/// Cosine similarities between a query's embedding and chunk embeddings, for engines whose embeddings are on the
/// device. One dispatch. The plan decides everything except the buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSimilarityPlan {
    width: usize,
    chunks: usize,
}

/// `SimilarityCall` of `select/chunk_similarity.wgsl`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct SimilarityCall {
    first_query: u32,
    first_chunk: u32,
    width: u32,
    chunks: u32,
}

impl ChunkSimilarityPlan {
    /// Plans the comparison of `chunks` embeddings of `width` elements.
    ///
    /// # Errors
    /// [`Error::Chunks`](crate::Error::Chunks) when there are no chunks or their width is 0;
    /// [`Error::Limit`](crate::Error::Limit) when there are more elements than a 32-bit index can count.
    pub fn new(width: usize, chunks: usize) -> Result<Self> {
        let elements = width.saturating_mul(chunks);
        check_index("the elements of all embeddings", elements as u64)?;
        check_widths(width, elements)?;
        if chunks == 0 {
            return Err(crate::Error::Chunks { reason: "there are no embeddings to compare".into() });
        }
        Ok(Self { width, chunks })
    }

    /// The kernel variants, for [`Kernels::prepare`].
    pub fn variants(&self, query: ElementType, chunks: ElementType) -> Vec<Variant> {
        vec![variant_of(query, chunks)]
    }

    /// Binds the embedding of the query, `[width]`, those of the chunks, `[chunks, width]`, and the f32 similarities to
    /// write, `[chunks]`.
    ///
    /// # Errors
    /// [`Error::Chunks`](crate::Error::Chunks) when the embeddings have another width; [`Error::Elements`] or
    /// [`Error::Buffer`] when the output does not fit the plan; [`Error::Plan`] when it shares a buffer with an
    /// embedding; [`Error::Limit`] when a tensor is too large.
    ///
    /// [`Error::Elements`]: crate::Error::Elements
    /// [`Error::Buffer`]: crate::Error::Buffer
    /// [`Error::Plan`]: crate::Error::Plan
    /// [`Error::Limit`]: crate::Error::Limit
    pub fn bind(&self, kernels: &Kernels, query: &Tensor, chunks: &Tensor, similarities: &Tensor) -> Result<Launches> {
        let limits = kernels.device().limits();
        if query.elements() != self.width || chunks.elements() != self.width * self.chunks {
            let reason = format!(
                "embeddings of {} and {} elements; the plan is for {} chunks of width {}",
                query.elements(),
                chunks.elements(),
                self.chunks,
                self.width
            );
            return Err(crate::Error::Chunks { reason });
        }
        check_output("similarities of chunks", similarities, self.chunks, ElementType::F32, &limits)?;
        let (query_row, chunk_rows) = (query.element_binding(&limits)?, chunks.element_binding(&limits)?);
        let call = SimilarityCall {
            first_query: query_row.first_element,
            first_chunk: chunk_rows.first_element,
            width: self.width as u32,
            chunks: self.chunks as u32,
        };
        let call = super::upload_call(kernels.device(), &call, &[])?;
        let buffers = [
            ("call", call.as_entire_buffer_binding()),
            ("rows", chunk_rows.buffer),
            ("queries", query_row.buffer),
            ("similarities", similarities.binding()),
        ];
        let grid = flat_grid(self.chunks as u64 * u64::from(FLAT_WORKGROUP), &limits)?;
        let variant = variant_of(query.element_type(), chunks.element_type());
        Ok([planned(kernels, &variant, &buffers, grid)?].into_iter().collect())
    }
}

fn variant_of(query: ElementType, chunks: ElementType) -> Variant {
    Variant::new(&SHADERS, "chunk_similarity").import("rows", rows_file(chunks)).import("queries", queries_file(query))
}

/// Every variant that a plan uses.
pub(super) fn variants() -> Vec<Variant> {
    ElementType::ALL.into_iter().flat_map(|query| ElementType::ALL.map(|chunks| variant_of(query, chunks))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn absurd_sizes_are_refused() {
        for (width, chunks) in [(usize::MAX, 2), (1 << 20, usize::MAX / 3)] {
            let plan = ChunkSimilarityPlan::new(width, chunks);
            assert!(matches!(plan, Err(Error::Limit { .. })), "{plan:?}");
        }
        assert!(matches!(ChunkSimilarityPlan::new(0, 3), Err(Error::Chunks { .. })));
        assert!(matches!(ChunkSimilarityPlan::new(3, 0), Err(Error::Chunks { .. })));
    }
}
