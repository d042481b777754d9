//! Kernel `sum_partials`: combines the statistics of parts of the keys.

use super::attention_row_stats::RowStats;
use crate::{Error, Result};

/// Combines row statistics of disjoint parts of the keys, in the order of the parts: the largest maximum, and `lse =
/// max + ln Σ exp(lse_i − max)`. A part in which a row sees nothing (−∞) changes nothing.
///
/// # Errors
/// [`Error::Elements`] when the parts have different rows; [`Error::NoTokens`] when there are none;
/// [`Error::NotANumber`] for a log-sum-exp or a maximum that is NaN, and [`Error::Plan`] for one that is +∞.
pub fn sum_partials(parts: &[RowStats]) -> Result<RowStats> {
    let rows = check_parts("row statistics of a part", parts.iter().flat_map(|part| [part.max.len(), part.lse.len()]))?;
    for part in parts {
        check_statistics("maxima of rows", &part.max)?;
        check_statistics("log-sum-exps of rows", &part.lse)?;
    }
    let max = |row: usize| parts.iter().map(|part| part.max[row]).fold(f32::NEG_INFINITY, f32::max);
    let lse = |row: usize| {
        let largest = parts.iter().map(|part| f64::from(part.lse[row])).fold(f64::NEG_INFINITY, f64::max);
        if largest == f64::NEG_INFINITY {
            return f32::NEG_INFINITY;
        }
        let sum: f64 = parts.iter().map(|part| (f64::from(part.lse[row]) - largest).exp()).sum();
        (largest + sum.ln()) as f32
    };
    Ok(RowStats { max: (0..rows).map(max).collect(), lse: (0..rows).map(lse).collect() })
}

/// Sums the counts of disjoint parts of the keys.
///
/// # Errors
/// [`Error::Elements`] when the parts have different rows; [`Error::NoTokens`] when there are none; [`Error::Limit`]
/// when a sum needs more than 32 bits.
pub fn sum_counts(parts: &[Vec<u32>]) -> Result<Vec<u32>> {
    let rows = check_parts("counts of a part", parts.iter().map(Vec::len))?;
    let sum = |row: usize| {
        let sum: u64 = parts.iter().map(|part| u64::from(part[row])).sum();
        u32::try_from(sum).map_err(|_| Error::Limit {
            what: format!("the count of row {row}"),
            needed: sum,
            allowed: u32::MAX.into(),
            hint: "pass disjoint parts; a row cannot see that many keys",
        })
    };
    (0..rows).map(sum).collect()
}

fn check_statistics(what: &'static str, rows: &[f32]) -> Result<()> {
    match rows.iter().position(|x| x.is_nan() || *x == f32::INFINITY) {
        None => Ok(()),
        Some(index) if rows[index].is_nan() => Err(Error::NotANumber { what, index }),
        Some(row) => {
            let reason = format!("row {row} has +∞ among the {what}; it must be finite, or −∞ where it sees nothing");
            Err(Error::Plan { what: "sum of partial statistics", reason })
        }
    }
}

fn check_parts(what: &'static str, mut lengths: impl Iterator<Item = usize>) -> Result<usize> {
    let Some(expected) = lengths.next() else {
        return Err(Error::NoTokens { what, hint: "pass at least one part" });
    };
    match lengths.find(|&length| length != expected) {
        Some(given) => Err(Error::Elements { what, given, expected, shape: "the first part".into() }),
        None => Ok(expected),
    }
}
