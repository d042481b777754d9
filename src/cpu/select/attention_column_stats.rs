//! Kernel `attention_column_stats`: the attention that every key receives, and how many keys each row needs.

use rayon::prelude::*;

use super::input::StatsInput;
use crate::counts::saturated;
use crate::plan::TokenRange;
use crate::policy::{ColumnRequest, HeadAggregation};
use crate::{Error, Result};

/// Statistics of columns.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct ColumnStats {
    /// Softmax weights summed over the rows, `[query_heads, keys]` or `[kv_heads, keys]`, depending on the aggregation.
    pub sums: Vec<f32>,
    /// `[query_heads, rows]`: visible keys at or above the threshold; empty if no count was requested.
    pub counts: Vec<u32>,
}

/// Column sums of softmax, and counts under a threshold, over the keys of `range` (VL-Cache A.5, the second kernel).
///
/// A weight is `exp(s − lse)`. It is at least `p` times the largest of its row when `s ≥ max + ln p`, so counting needs
/// no weights. `lse` is `[query_heads, rows]` over all keys, from [`attention_row_stats`](super::attention_row_stats())
/// or the caller's own prefill. `max` has the same shape and is needed only for counts.
///
/// # Errors
/// As [`StatsInput::check`]; [`Error::Elements`] when there is not one LSE, and for counts one maximum, per head and
/// row; [`Error::Budget`] when the threshold is not in 0 ..= 1.
pub fn attention_column_stats(
    input: &StatsInput<'_>,
    range: TokenRange,
    request: ColumnRequest,
    lse: &[f32],
    max: &[f32],
) -> Result<ColumnStats> {
    input.check(range)?;
    let log_threshold = request.log_threshold()?;
    let (heads, rows) = (input.shape.query_heads(), input.rows.len());
    let maxima_needed = if log_threshold.is_some() { heads * rows } else { max.len() };
    for (what, given, expected) in
        [("log-sum-exps of rows", lse.len(), heads * rows), ("maxima of rows", max.len(), maxima_needed)]
    {
        if given != expected {
            return Err(Error::Elements { what, given, expected, shape: format!("[{heads}, {rows}]") });
        }
    }
    let of_head = |head: usize| {
        let mut sums = vec![0.0f64; range.len()];
        let mut counts = Vec::new();
        input.scores_of_head(head, range, |row, scores| {
            let at = head * rows + row;
            sums.iter_mut().zip(scores).for_each(|(sum, score)| *sum += (score - f64::from(lse[at])).exp());
            if let Some(log_threshold) = log_threshold {
                // Maxima are f32: rounded as they are, the largest score of a row reaches a threshold of 1.
                let least = max[at] + log_threshold;
                counts.push(saturated(scores.iter().filter(|&&score| score as f32 >= least).count()));
            }
        });
        (sums, counts)
    };
    let measured: Vec<(Vec<f64>, Vec<u32>)> = (0..heads).into_par_iter().map(of_head).collect();
    let counts = measured.iter().flat_map(|(_, counts)| counts).copied().collect();
    let mut sums = Vec::with_capacity(request.aggregation.rows(heads, input.shape.kv_heads()) * range.len());
    for group in measured.chunks_exact(input.shape.group()) {
        match request.aggregation {
            HeadAggregation::Each => sums.extend(group.iter().flat_map(|(sums, _)| sums).map(|&sum| sum as f32)),
            aggregation => sums.extend(
                (0..range.len())
                    .filter_map(|key| aggregation.of(group.iter().map(|(sums, _)| sums[key])).map(|sum| sum as f32)),
            ),
        }
    }
    Ok(ColumnStats { sums, counts })
}
