//! Kernels that measure attention and carry out decisions about tokens.

mod attention_stats;
mod chunk_similarity;
mod evicted;
mod key_tile;
mod launch;
mod merge_tokens;
mod move_rows;
mod token_scores;
mod top_k;
mod words;

pub use attention_stats::{AttentionStats, AttentionStatsPlan};
pub use chunk_similarity::ChunkSimilarityPlan;
pub use evicted::EvictedPlan;
pub use launch::Launches;
pub use merge_tokens::{BoundMerge, MergePlan};
pub use move_rows::{GatherPlan, ReorderChunksPlan};
pub use token_scores::TokenScoresPlan;
pub use top_k::TopKPlan;
pub use words::Words;

use super::device::tensor::Tensor;
use crate::backend::{check_index, check_indices};
use crate::plan::ElementType;
use crate::{Error, Result};

/// Checks that `output` holds `expected` elements of the type `element_type`.
fn check_output(what: &'static str, output: &Tensor, expected: usize, element_type: ElementType) -> Result<()> {
    if output.elements() != expected {
        let (given, shape) = (output.elements(), "the result".into());
        return Err(Error::Elements { what, given, expected, shape });
    }
    if output.element_type() != element_type {
        let reason = format!("it holds {:?}, but the kernel writes {element_type:?}", output.element_type());
        return Err(Error::Buffer { what, reason });
    }
    Ok(())
}
