//! Tokens per layer that shrink from the lowest layer to the highest (PyramidKV).

use super::budget::check_layers;
use crate::counts::{TokenCount, collected, filled};
use crate::{Error, Result};

/// The shape of the pyramid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PyramidShape {
    /// Number of tokens of a layer in the middle, including the recent ones. The mean over layers is up to a few
    /// tokens more: see [`pyramid_budgets`].
    pub capacity: usize,
    /// Number of last tokens of the prompt. Every layer keeps them.
    pub recent: usize,
    /// Steepness: the highest layer keeps `(capacity − recent) / beta` tokens or somewhat more in addition to the recent
    /// ones. PyramidKV uses 20.
    pub beta: usize,
}

/// Budgets that fall linearly with the layer (PyramidKV): from `2c − min` to `min = c / β` in addition to the recent
/// tokens, with `c = capacity − recent`. No layer keeps more tokens than the prompt has; the excess of the lowest layer
/// raises the highest. A prompt shorter than the capacity is kept whole. In a prompt shorter than `2c` every layer
/// keeps the capacity, and so does a single layer.
///
/// Layers differ by whole tokens, rounded down as PyramidKV's code does, so that the highest layer keeps up to a token
/// for each layer more than `min`, and the mean exceeds the capacity by half of that: by 9 tokens for 32 layers,
/// a prompt of 1000, and a capacity of 50.
///
/// # Errors
/// [`Error::Budget`] when there are no layers or more than [`MOST_LAYERS`](crate::plan::MOST_LAYERS), the capacity does
/// not exceed the recent tokens, or β is 0; [`Error::Limit`] when the prompt is longer than
/// [`MOST_TOKENS`](crate::plan::MOST_TOKENS).
pub fn pyramid_budgets(layers: usize, length: usize, shape: PyramidShape) -> Result<Vec<usize>> {
    let PyramidShape { capacity, recent, beta } = shape;
    check_layers(layers)?;
    let length = TokenCount::new(length)?.get();
    if beta == 0 {
        return Err(Error::Budget { what: "beta of the pyramid", given: "0".into(), allowed: "at least 1".into() });
    }
    if recent >= capacity {
        let (given, allowed) = (capacity.to_string(), format!("more than {recent}, the recent tokens"));
        return Err(Error::Budget { what: "capacity of a layer", given, allowed });
    }
    let past = capacity - recent;
    if length < capacity {
        return filled("budgets of layers", layers, length);
    }
    if length < 2 * past || layers == 1 {
        return filled("budgets of layers", layers, capacity);
    }
    let mut smallest = past / beta;
    let mut largest = 2 * past - smallest;
    if largest >= length - recent {
        // Between c and 2c, since the prompt is longer than the capacity.
        largest = length - recent;
        smallest = 2 * past - largest;
    }
    let step = (largest - smallest) / (layers - 1);
    collected("budgets of layers", (0..layers).map(|layer| largest - layer * step + recent))
}
