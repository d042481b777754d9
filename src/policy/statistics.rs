//! The attention statistics that a policy requests.

use super::budget::check_ratio;
use super::heads::HeadAggregation;
use crate::{Error, Result};

/// The statistics of columns to measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ColumnRequest {
    /// How the query heads of a group are aggregated.
    pub aggregation: HeadAggregation,
    /// For each row, count the keys whose weight is at least this fraction of the row's largest; `None` counts nothing.
    pub threshold: Option<f32>,
}

impl ColumnRequest {
    /// The logarithm of the threshold, for comparison with scores.
    ///
    /// # Errors
    /// [`Error::Budget`] when the threshold is not in 0 ..= 1.
    pub fn log_threshold(&self) -> Result<Option<f32>> {
        let Some(threshold) = self.threshold else { return Ok(None) };
        check_ratio("threshold of counts", threshold.into())?;
        // Not −∞, because shaders do not add infinities reliably.
        Ok(Some(threshold.ln().max(f32::MIN)))
    }
}

/// The source of the maximum and the log-sum-exp of the query rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowStatsSource {
    /// They are measured. Keys are read twice.
    Measured,
    /// The caller knows the log-sum-exp from its own prefill. Keys are read once. Counting is impossible then, since it
    /// needs the maximum of each row.
    KnownLse,
    /// Maximum and log-sum-exp are known: those over all parts of a context. Keys are read once.
    Known,
}

impl RowStatsSource {
    /// The error for a log-sum-exp that is given although rows are measured, or missing although it is declared known.
    pub(crate) fn mismatch(self) -> Error {
        let reason = format!("the rows are planned as {self:?}; pass a log-sum-exp exactly if it is known");
        Error::Plan { what: "attention statistics", reason }
    }
}

/// The statistics to measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StatsRequest {
    /// Of columns.
    pub columns: ColumnRequest,
    /// Of rows.
    pub rows: RowStatsSource,
}

impl StatsRequest {
    /// The logarithm of the counting threshold, if any.
    ///
    /// # Errors
    /// [`Error::Budget`] when the threshold is not in 0 ..= 1; [`Error::Plan`] when counts are requested and only the
    /// log-sum-exp is known.
    pub fn log_threshold(&self) -> Result<Option<f32>> {
        let log_threshold = self.columns.log_threshold()?;
        if log_threshold.is_some() && self.rows == RowStatsSource::KnownLse {
            return Err(Error::Plan {
                what: "attention statistics",
                reason: "counts under a threshold need the maximum of each row; measure the rows, or count nothing"
                    .into(),
            });
        }
        Ok(log_threshold)
    }
}
