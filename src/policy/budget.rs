//! Tokens per layer: the same for all, and what all budgets share.

use crate::{Error, Result};

/// What saves products of a ratio and a whole number from ending just below a whole number.
pub(super) const ROUNDING: f64 = 1e-12;

/// Checks that a ratio lies in 0 ..= 1.
///
/// # Errors
/// [`Error::Budget`] when it does not, or is NaN.
pub fn check_ratio(what: &'static str, ratio: f64) -> Result<()> {
    if (0.0..=1.0).contains(&ratio) {
        return Ok(());
    }
    Err(Error::Budget { what, given: ratio.to_string(), allowed: "0 to 1".into() })
}

/// Budgets of `layers` layers over a prompt of `length` tokens, as equal as their total
/// `floor(layers · length · ratio)` allows: lower layers take what is left over. The baseline of all layer budgets.
///
/// # Errors
/// [`Error::Budget`] when the ratio is not in 0 ..= 1 or there are no layers or tokens.
pub fn uniform_budgets(layers: usize, length: usize, ratio: f64) -> Result<Vec<usize>> {
    let total = total_budget(layers, length, ratio)?;
    Ok((0..layers).map(|layer| total / layers + usize::from(layer < total % layers)).collect())
}

/// Tokens that all layers together may keep, per KV head.
pub(super) fn total_budget(layers: usize, length: usize, ratio: f64) -> Result<usize> {
    check_ratio("share of tokens to keep", ratio)?;
    for (what, given) in [("number of layers", layers), ("length of the prompt", length)] {
        if given == 0 {
            return Err(Error::Budget { what, given: "0".into(), allowed: "at least 1".into() });
        }
    }
    Ok(((layers * length) as f64 * ratio + ROUNDING).floor() as usize)
}
