//! Grids of levels: how the scale and the zero of a group follow from its weights.

use half::f16;

use crate::shape::{Bits, GroupSize};

/// The levels that weights are rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Bits of a code.
    pub bits: Bits,
    /// Inputs of a group.
    pub group: GroupSize,
    /// Where the zero is.
    pub symmetry: Symmetry,
    /// What scales are rounded to before codes are chosen.
    pub scales: ScaleType,
}

/// Where the zero of a group is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Symmetry {
    /// At 2^(b - 1), for all groups.
    Symmetric,
    /// Where the range of the group's weights wants it.
    Asymmetric,
}

/// What scales are rounded to before codes are chosen, so that the codes fit the scales that are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleType {
    /// f16, as checkpoints store them, at least 6e-8.
    F16,
    /// f32, as the published programs compute them; they round when they store.
    F32,
}

/// The levels of one group: `scale · (code - zero)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Levels {
    pub scale: f32,
    pub zero: u16,
}

/// Whose rule for the range of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RangeRule {
    /// GPTQ's `Quantizer.find_params`: the range includes 0.
    Gptq,
    /// AWQ's `pseudo_quantize_tensor`: the range of the weights, at least 1e-5 wide.
    Awq,
}

impl Grid {
    /// The levels for weights from `low` to `high`.
    pub(super) fn levels(&self, rule: RangeRule, low: f64, high: f64) -> Levels {
        let (largest, middle) = (f64::from(self.bits.largest()), self.bits.middle() as u16);
        match (rule, self.symmetry) {
            (RangeRule::Gptq, symmetry) => {
                let (mut low, mut high) = (low.min(0.0), high.max(0.0));
                if symmetry == Symmetry::Symmetric {
                    high = high.max(-low);
                    low = -high;
                }
                if low == 0.0 && high == 0.0 {
                    (low, high) = (-1.0, 1.0);
                }
                let scale = self.scales.rounded((high - low) / largest);
                match symmetry {
                    Symmetry::Symmetric => Levels { scale, zero: middle },
                    Symmetry::Asymmetric => Levels { scale, zero: self.zero(low, scale) },
                }
            }
            (RangeRule::Awq, Symmetry::Asymmetric) => {
                // A zero point stands for a weight of 0, so the range of a group of one sign begins there. AWQ's own
                // code has groups of 128 and assumes both signs; a short last group may have one.
                let (low, high) = (low.min(0.0), high.max(0.0));
                let scale = self.scales.rounded((high - low).max(1e-5) / largest);
                Levels { scale, zero: self.zero(low, scale) }
            }
            (RangeRule::Awq, Symmetry::Symmetric) => {
                let positive = f64::from(self.bits.middle() - 1);
                let scale = self.scales.rounded(high.abs().max(low.abs()).max(1e-5) / positive);
                Levels { scale, zero: middle }
            }
        }
    }

    /// The levels for a group's weights.
    pub(super) fn fit(&self, rule: RangeRule, weights: impl Iterator<Item = f64>) -> Levels {
        let range = weights.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), w| (low.min(w), high.max(w)));
        self.levels(rule, range.0, range.1)
    }

    fn zero(&self, low: f64, scale: f32) -> u16 {
        // A saturating cast of an integer from 0 to 255.
        (-low / f64::from(scale)).round_ties_even().clamp(0.0, f64::from(self.bits.largest())) as u16
    }
}

impl ScaleType {
    fn rounded(self, scale: f64) -> f32 {
        match self {
            Self::F32 => (scale as f32).clamp(f32::MIN_POSITIVE, f32::MAX),
            Self::F16 => f16::from_f64(scale).clamp(f16::MIN_POSITIVE_SUBNORMAL, f16::MAX).into(),
        }
    }
}

impl Levels {
    /// The code of a weight before it is clamped to the grid.
    pub fn code(self, weight: f64) -> f64 {
        (weight / f64::from(self.scale)).round_ties_even() + f64::from(self.zero)
    }

    /// The weight of a code.
    pub fn weight(self, code: f64) -> f64 {
        f64::from(self.scale) * (code - f64::from(self.zero))
    }
}
