//! Kernels that measure attention and carry out decisions about tokens.

mod attention_stats;
mod chunk_similarity;
mod evicted;
mod merge_tokens;
mod move_rows;
mod stats_matrix;
mod token_scores;
mod top_k;
mod words;

pub use attention_stats::{AttentionStats, AttentionStatsPlan, StatsBuffer};
pub use chunk_similarity::ChunkSimilarityPlan;
pub use evicted::EvictedPlan;
pub use merge_tokens::{BoundMerge, MergePlan};
pub use move_rows::{GatherPlan, ReorderChunksPlan};
pub use token_scores::TokenScoresPlan;
pub use top_k::TopKPlan;
pub use words::Words;

use super::device::{Tensor, Variant, buffers};
use crate::Result;
use crate::backend::{check_index, check_indices};
use crate::plan::{ElementType, RowLayout};
use crate::policy::HeadAggregation;

/// Every kernel variant that plans of this folder use. Variants that differ only in numbers appear once.
pub(super) fn variants() -> Vec<Variant> {
    [
        attention_stats::variants(),
        chunk_similarity::variants(),
        evicted::variants(),
        merge_tokens::variants(),
        move_rows::variants(),
        token_scores::variants(),
        top_k::variants(),
    ]
    .concat()
}

/// A buffer of arguments: a struct with the layout of the shader's, and the words that follow it.
fn upload_call<T: bytemuck::Pod>(device: &wgpu::Device, call: &T, words: &[u32]) -> Result<wgpu::Buffer> {
    let bytes = [bytemuck::bytes_of(call), bytemuck::cast_slice(words)].concat();
    buffers::create_filled(device, "arguments", &bytes, wgpu::BufferUsages::STORAGE)
}

/// The shader file that reads the elements of query rows.
const fn queries_file(element_type: ElementType) -> &'static str {
    match element_type {
        ElementType::F32 => "select/queries.wgsl#f32",
        ElementType::F16 => "select/queries.wgsl#f16",
        ElementType::Bf16 => "select/queries.wgsl#bf16",
    }
}

/// The value of `AGGREGATION` in the shaders.
const fn aggregation_constant(aggregation: HeadAggregation) -> usize {
    match aggregation {
        HeadAggregation::Each => 0,
        HeadAggregation::Sum => 1,
        HeadAggregation::Mean => 2,
        HeadAggregation::Max => 3,
    }
}

/// Checks that 32-bit indices can address `heads` heads of rows.
fn check_reach(rows: &RowLayout, heads: usize, head_dim: usize) -> Result<()> {
    let end = rows.row(rows.tokens.max(1) - 1, heads - 1).saturating_add(head_dim);
    let needed = end.max(rows.token_stride).max(rows.head_stride) as u64;
    check_index("the elements of a tensor", needed)
}

/// Checks that `output` holds what a kernel writes, in a buffer that kernels can write.
fn check_output(
    what: &'static str,
    output: &Tensor,
    expected: usize,
    element_type: ElementType,
    limits: &wgpu::Limits,
) -> Result<()> {
    crate::backend::check_output(what, output, expected, element_type)?;
    output.check_aligned(what, limits)
}
