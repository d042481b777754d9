//! Kernel `attention_row_stats`: the largest score and the log-sum-exp of every query row.

use rayon::prelude::*;

use super::input::StatsInput;
use crate::Result;
use crate::plan::TokenRange;

/// Statistics of query rows. Scores are scaled by [`StatsInput::scale`], and logarithms are natural.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct RowStats {
    /// The largest score that a row sees, `[query_heads, rows]`; −∞ where it sees none.
    pub max: Vec<f32>,
    /// The logarithm of the sum of the exponentials of its scores, `[query_heads, rows]`.
    pub lse: Vec<f32>,
}

/// Maximum and log-sum-exp of every query row over the keys of `range` that it sees (VL-Cache A.5, the first kernel).
///
/// [`sum_partials`](super::sum_partials()) combines the statistics of disjoint ranges.
///
/// # Errors
/// As [`StatsInput::check`].
pub fn attention_row_stats(input: &StatsInput<'_>, range: TokenRange) -> Result<RowStats> {
    input.check(range)?;
    let of_head = |head: usize| {
        let mut stats = RowStats::default();
        input.scores_of_head(head, range, |_, scores| {
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
            stats.max.push(max as f32);
            stats.lse.push((max + sum.ln()) as f32);
        });
        stats
    };
    let heads: Vec<RowStats> = (0..input.shape.query_heads()).into_par_iter().map(of_head).collect();
    let join = |of: fn(&RowStats) -> &Vec<f32>| heads.iter().flat_map(of).copied().collect();
    Ok(RowStats { max: join(|stats| &stats.max), lse: join(|stats| &stats.lse) })
}
