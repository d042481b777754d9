//! The fraction of a head's attention that is negligible.

use super::query_positions::QueryPositions;
use crate::{Error, Result};

/// The fraction of the row's maximum below which VL-Cache neglects an entry (its p).
pub const DEFAULT_THRESHOLD: f32 = 0.01;

/// Sparsity of each query head: the fraction of visible entries that lie below `p` times the largest of their row
/// (VL-Cache: `γ = 1 − kept / visible`). Entries hidden by causality are not counted at all.
///
/// `counts` are `[query_heads, rows]`: the entries that are not below, as
/// [`attention_column_stats`](crate::cpu::attention_column_stats) counts them.
///
/// # Errors
/// [`Error::Elements`] when the counts are not whole rows; [`Error::Budget`] when a head counts more entries than it
/// sees.
pub fn sparsity(counts: &[u32], rows: &QueryPositions) -> Result<Vec<f64>> {
    if counts.is_empty() || !counts.len().is_multiple_of(rows.len()) {
        let shape = format!("[query_heads, {}]", rows.len());
        let expected = counts.len().next_multiple_of(rows.len()).max(rows.len());
        return Err(Error::Elements { what: "counts", given: counts.len(), expected, shape });
    }
    let visible = rows.visible();
    let of_head = |counts: &[u32]| {
        let kept: u64 = counts.iter().map(|&count| u64::from(count)).sum();
        if kept > visible {
            let (given, allowed) = (kept.to_string(), format!("at most {visible}, the entries the rows see"));
            return Err(Error::Budget { what: "count of entries", given, allowed });
        }
        Ok(1.0 - kept as f64 / visible as f64)
    };
    counts.chunks_exact(rows.len()).map(of_head).collect()
}

/// Sparsity of a layer: the mean of its heads (VL-Cache). 0 for no heads.
pub fn layer_sparsity(heads: &[f64]) -> f64 {
    if heads.is_empty() { 0.0 } else { heads.iter().sum::<f64>() / heads.len() as f64 }
}
