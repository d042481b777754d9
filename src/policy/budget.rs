//! Budgets of tokens per layer: equal budgets, and the checks that all budgets share.

use crate::counts::{MOST_LAYERS, TokenCount, collected, whole};
use crate::{Error, Result};

/// By how much a sum of shares may miss what it would be without rounding.
pub(super) const ROUNDING: f64 = 1e-12;

/// The whole tokens of `x` tokens. What rounding left just below a whole number counts as that number: floats lie the
/// farther apart the larger they are, and a product of three is wrong by less than twice their distance.
pub(super) fn whole_tokens(x: f64) -> usize {
    whole(x + (4.0 * f64::EPSILON * x).max(ROUNDING))
}

/// A share of `count` tokens, rounded down.
pub(super) fn share_of(count: f64, ratio: f64) -> usize {
    whole_tokens(count * ratio).min(whole(count))
}

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

/// Equal budgets of `layers` layers over a prompt of `length` tokens, as far as their total `floor(layers · length ·
/// ratio)` allows. Lower layers take the remainder. The baseline of all layer budgets. A policy with
/// [`BudgetRule::Uniform`](super::BudgetRule::Uniform) leaves the remainder, so that layers do not differ.
///
/// # Errors
/// [`Error::Budget`] when the ratio is not in 0 ..= 1, there are no layers or tokens, or more than
/// [`MOST_LAYERS`](crate::plan::MOST_LAYERS) layers;
/// [`Error::Limit`] when the prompt is longer than [`MOST_TOKENS`](crate::plan::MOST_TOKENS).
pub fn uniform_budgets(layers: usize, length: usize, ratio: f64) -> Result<Vec<usize>> {
    let total = total_budget(layers, length, ratio)?;
    collected("budgets of layers", (0..layers).map(|layer| total / layers + usize::from(layer < total % layers)))
}

/// Tokens that all layers together may keep, per KV head.
pub(super) fn total_budget(layers: usize, length: usize, ratio: f64) -> Result<usize> {
    check_layers(layers)?;
    share_of_tokens(layers, length, ratio)
}

/// Tokens that `heads` heads of a prompt together may keep.
pub(super) fn share_of_tokens(heads: usize, length: usize, ratio: f64) -> Result<usize> {
    check_ratio("share of tokens to keep", ratio)?;
    if length == 0 {
        return Err(Error::Budget { what: "length of the prompt", given: "0".into(), allowed: "at least 1".into() });
    }
    let tokens = TokenCount::new(length)?.get();
    // The product of the two floats rounds like the float of the integer product.
    Ok(share_of(heads as f64 * tokens as f64, ratio))
}

/// Checks that there are layers, and no more than [`MOST_LAYERS`].
pub(super) fn check_layers(layers: usize) -> Result<()> {
    if (1..=MOST_LAYERS).contains(&layers) {
        return Ok(());
    }
    let allowed = format!("1 to {MOST_LAYERS}");
    Err(Error::Budget { what: "number of layers", given: layers.to_string(), allowed })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shares in hundredths are what integers say, whatever the number of tokens.
    #[test]
    fn shares_are_those_of_integers() {
        let large = [16_384, 99_999, 100_000, 3_200_000, 123_456_789, 3_200_000_000, 1_000_000_000_000];
        for count in (0..2000u64).chain(large) {
            for hundredths in 0..=100 {
                let share = share_of(count as f64, f64::from(hundredths as u32) / 100.0);
                assert_eq!(share as u64, count * hundredths / 100, "{hundredths} % of {count}");
            }
        }
        assert_eq!(uniform_budgets(32, 100_000, 0.29).map(|budgets| budgets.iter().sum::<usize>()), Ok(928_000));
    }
}
