//! Kernels that measure attention and carry out decisions: statistics, the best scores, gathering, merging, chunks.
//!
//! Attention statistics come in three kernels, as in VL-Cache (A.5): [`attention_row_stats`] for the maximum and the
//! log-sum-exp of every query row, [`attention_column_stats`] for the attention that every key receives, and
//! [`sum_partials`], which combines the statistics of parts of the keys.

mod add_attention;
mod attention_column_stats;
mod attention_row_stats;
mod chunk_similarity;
mod gather;
mod input;
mod merge_tokens;
mod nearest_kept;
mod reorder_chunks;
mod sum_partials;
mod token_scores;
mod top_k;

pub(in crate::cpu) use add_attention::add_attention;
pub use attention_column_stats::{ColumnStats, attention_column_stats};
pub use attention_row_stats::{RowStats, attention_row_stats};
pub use chunk_similarity::chunk_similarity;
pub use gather::gather;
pub use input::{DenseRows, StatsInput};
pub use merge_tokens::merge_tokens;
pub use nearest_kept::{KeptTokens, nearest_kept};
pub use reorder_chunks::reorder_chunks;
pub use sum_partials::{sum_counts, sum_partials};
pub use token_scores::token_scores;
pub use top_k::top_k;
