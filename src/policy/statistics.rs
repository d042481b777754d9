//! What a policy wants measured of attention.

use super::budget::check_ratio;
use super::heads::HeadAggregation;
use crate::{Error, Result};

/// What is to be measured of columns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ColumnRequest {
    /// What becomes of the query heads of a group.
    pub aggregation: HeadAggregation,
    /// Count, for each row, the keys whose weight is at least this share of the row's largest; `None` counts nothing.
    pub threshold: Option<f32>,
}

impl ColumnRequest {
    /// The logarithm of the threshold, which is what scores are compared with.
    ///
    /// # Errors
    /// [`Error::Budget`] when the threshold is not in 0 ..= 1.
    pub fn log_threshold(&self) -> Result<Option<f32>> {
        let Some(threshold) = self.threshold else { return Ok(None) };
        check_ratio("threshold of counts", threshold.into())?;
        // Not −∞, which a shader cannot be relied on to add.
        Ok(Some(threshold.ln().max(f32::MIN)))
    }
}

/// Where maximum and log-sum-exp of the query rows come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowStatsSource {
    /// They are measured: keys are read twice.
    Measured,
    /// The caller knows the log-sum-exp from its own prefill: keys are read once. Nothing can be counted then, since
    /// counting needs the maximum of each row.
    KnownLse,
}

impl RowStatsSource {
    /// The error of a log-sum-exp that is given where rows are measured, or missing where it is known.
    pub(crate) fn mismatch(self) -> Error {
        let reason = format!("the rows are planned as {self:?}, and a log-sum-exp must be given for known ones");
        Error::Plan { what: "attention statistics", reason }
    }
}

/// What a device is to measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StatsRequest {
    /// Of columns.
    pub columns: ColumnRequest,
    /// Of rows.
    pub rows: RowStatsSource,
}

impl StatsRequest {
    /// The logarithm of the threshold that is counted by, if any.
    ///
    /// # Errors
    /// [`Error::Budget`] when the threshold is not in 0 ..= 1; [`Error::Plan`] when counts are asked for and only the
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
