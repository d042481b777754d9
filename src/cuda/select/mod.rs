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

use crate::backend::{check_index, check_indices, check_output};
