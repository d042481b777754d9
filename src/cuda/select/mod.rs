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

use super::device::indices::Indices;
use super::device::tensor::Tensor;
use crate::plan::{ElementType, TokenIndices};
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

/// Checks that there are `count` indices for each KV head.
fn check_indices(what: &'static str, indices: &Indices, kv_heads: usize, count: usize) -> Result<()> {
    let given = indices.shape();
    if (given.kv_heads(), given.count()) == (kv_heads, count) {
        return Ok(());
    }
    let shape = format!("[{kv_heads}, {count}]; they are [{}, {}]", given.kv_heads(), given.count());
    Err(Error::Elements { what, given: given.indices(), expected: kv_heads * count, shape })
}

/// Checks that a 32-bit index can count `needed` of `what`.
fn check_index(what: &str, needed: usize) -> Result<()> {
    let (needed, allowed) = (needed as u64, u64::from(u32::MAX));
    if needed <= allowed {
        return Ok(());
    }
    Err(Error::Limit { what: what.into(), needed, allowed, hint: "pass fewer tokens at once" })
}
