//! Budgets of tokens per layer, by the sparsity of each layer's attention (VL-Cache).

use super::budget::{check_ratio, share_of, total_budget, whole_tokens};
use crate::{Error, Result};

/// Bounds on the budget of every layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VlCacheLimits {
    /// Minimum fraction of the prompt that every layer keeps (VL-Cache: 0.01).
    pub min_ratio: f64,
    /// Maximum fraction of the prompt that a layer keeps (VL-Cache: 1).
    pub max_ratio: f64,
    /// Tokens that every layer keeps in any case. Every layer keeps one at least.
    pub mandatory: usize,
}

impl Default for VlCacheLimits {
    fn default() -> Self {
        Self { min_ratio: 0.01, max_ratio: 1.0, mandatory: 0 }
    }
}

/// Budgets of all layers, and the ratios behind them.
#[derive(Clone, Debug, PartialEq)]
pub struct VlCacheBudgets {
    /// `(1 − γ) / Z · α · layers` for each layer.
    pub raw_ratios: Vec<f64>,
    /// The same ratios, clipped to the bounds.
    pub clipped_ratios: Vec<f64>,
    /// Tokens per KV head of each layer. They sum to `floor(layers · length · α)` unless the bounds prevent it.
    pub tokens: Vec<usize>,
}

/// Divides a fraction `α` of a prompt of `length` tokens among layers by their sparsity γ (VL-Cache):
///
/// `β = clip((1 − γ) / Z · α · layers, min_ratio, max_ratio)` with `Z = Σ (1 − γ)`.
///
/// Then the total is apportioned in whole tokens by largest remainder: `floor(β · length)` each, one more by descending
/// fraction (ties to the lower layer), and the remainder fills layers in order, each up to its largest share. If the
/// lower bounds exceed the total, layers give tokens back by ascending fraction, each down to its lower bound before the
/// next gives any. If the bounds alone exceed the total, the bounds win. If all layers are entirely sparse (`Z = 0`),
/// they are treated alike.
///
/// The paper does not say what becomes of the tokens that clipping takes or gives. Here the total stays as it was, and
/// single layers make up the difference, so that their budgets are not in proportion to their density.
///
/// # Errors
/// [`Error::Budget`] when a ratio is not in 0 ..= 1, the bounds cross, or there are no layers or more than
/// [`MOST_LAYERS`](crate::plan::MOST_LAYERS); [`Error::NotANumber`] when a sparsity is NaN; [`Error::Limit`] when the
/// prompt is longer than [`MOST_TOKENS`](crate::plan::MOST_TOKENS).
pub fn vlcache_budgets(sparsity: &[f64], length: usize, alpha: f64, limits: VlCacheLimits) -> Result<VlCacheBudgets> {
    let target = total_budget(sparsity.len(), length, alpha)?;
    budgets_to_target(sparsity, length, alpha, limits, target)
}

/// [`vlcache_budgets`] for a given total.
pub(super) fn budgets_to_target(
    sparsity: &[f64],
    length: usize,
    alpha: f64,
    limits: VlCacheLimits,
    target: usize,
) -> Result<VlCacheBudgets> {
    let [lower, upper] = bounds(length, limits)?;
    if let Some(index) = sparsity.iter().position(|sparsity| sparsity.is_nan()) {
        return Err(Error::NotANumber { what: "sparsities of layers", index });
    }
    sparsity.iter().try_for_each(|&sparsity| check_ratio("sparsity of a layer", sparsity))?;
    let layers = sparsity.len() as f64;
    let density_sum: f64 = sparsity.iter().map(|sparsity| 1.0 - sparsity).sum();
    let share = |sparsity: &f64| if density_sum > 0.0 { (1.0 - sparsity) / density_sum } else { 1.0 / layers };
    let raw_ratios: Vec<f64> = sparsity.iter().map(|sparsity| share(sparsity) * alpha * layers).collect();
    let clipped_ratios: Vec<f64> =
        raw_ratios.iter().map(|ratio| ratio.clamp(limits.min_ratio, limits.max_ratio)).collect();
    let wanted: Vec<f64> =
        clipped_ratios.iter().map(|ratio| (ratio * length as f64).clamp(lower as f64, upper as f64)).collect();
    Ok(VlCacheBudgets { raw_ratios, clipped_ratios, tokens: apportion(&wanted, target, lower, upper) })
}

fn bounds(length: usize, limits: VlCacheLimits) -> Result<[usize; 2]> {
    check_ratio("smallest share of a layer", limits.min_ratio)?;
    check_ratio("largest share of a layer", limits.max_ratio)?;
    if limits.min_ratio > limits.max_ratio {
        let (given, allowed) = (limits.min_ratio.to_string(), format!("at most {}, the largest", limits.max_ratio));
        return Err(Error::Budget { what: "smallest share of a layer", given, allowed });
    }
    if limits.mandatory > length {
        let (given, allowed) = (limits.mandatory.to_string(), format!("at most {length}, the tokens of the prompt"));
        return Err(Error::Budget { what: "mandatory tokens", given, allowed });
    }
    let share = |ratio: f64| share_of(length as f64, ratio);
    let lower = share(limits.min_ratio).max(limits.mandatory).max(1);
    Ok([lower, share(limits.max_ratio).max(lower).min(length)])
}

/// Integers close to `wanted` that sum to `target`, as far as the bounds allow.
fn apportion(wanted: &[f64], target: usize, lower: usize, upper: usize) -> Vec<usize> {
    let mut tokens: Vec<usize> = wanted.iter().copied().map(whole_tokens).collect();
    let fractions: Vec<f64> = wanted.iter().zip(&tokens).map(|(wanted, &tokens)| wanted - tokens as f64).collect();
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    let sum: usize = tokens.iter().sum();
    if sum > target {
        order.sort_by(|&a, &b| fractions[a].total_cmp(&fractions[b]).then(a.cmp(&b)));
        let mut excess = sum - target;
        for layer in order {
            let given = excess.min(tokens[layer] - lower.min(tokens[layer]));
            tokens[layer] -= given;
            excess -= given;
        }
        return tokens;
    }
    let mut left = target - sum;
    order.sort_by(|&a, &b| fractions[b].total_cmp(&fractions[a]).then(a.cmp(&b)));
    for layer in order {
        let taken = left.min(usize::from(tokens[layer] < upper));
        tokens[layer] += taken;
        left -= taken;
    }
    for tokens in &mut tokens {
        let taken = left.min(upper - *tokens);
        *tokens += taken;
        left -= taken;
    }
    tokens
}
