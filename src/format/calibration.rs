//! CalibQuant's calibration of the scores of a packed span (arXiv 2502.14882, eq. 7 and 8).

use crate::{Error, Result};

/// The two offsets (τ1, τ2) of CalibQuant's calibration.
///
/// With γ and δ the smallest and the largest score of a query head over the packed span, the calibrated scores map
/// `[γ, δ]` linearly onto `[γ − τ1, δ − τ2]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Calibration {
    tau1: f32,
    tau2: f32,
}

impl Calibration {
    /// Leaves scores unchanged: τ1 = τ2 = 0.
    pub const IDENTITY: Self = Self { tau1: 0.0, tau2: 0.0 };

    /// The candidates of the paper's grid search, {0, 1, 2, 3}², the identity first.
    pub fn grid() -> impl Iterator<Item = Self> {
        (0..16).map(|i| Self { tau1: (i / 4) as f32, tau2: (i % 4) as f32 })
    }

    /// Creates a calibration after checking it.
    ///
    /// # Errors
    /// [`Error::Format`] unless both offsets are finite and not negative.
    pub fn new(tau1: f32, tau2: f32) -> Result<Self> {
        let fine = |tau: f32| tau.is_finite() && tau >= 0.0;
        if !(fine(tau1) && fine(tau2)) {
            return Err(Error::Format {
                format: format!("calibration ({tau1}, {tau2})"),
                reason: "τ1 and τ2 must be finite and at least 0; the paper searches {0, 1, 2, 3}".into(),
            });
        }
        Ok(Self { tau1, tau2 })
    }

    /// How much the lower end of the scores is moved down.
    pub const fn tau1(&self) -> f32 {
        self.tau1
    }

    /// How much the upper end of the scores is moved down.
    pub const fn tau2(&self) -> f32 {
        self.tau2
    }

    /// The affine map of the scores of one query head. `smallest` and `largest` are its extremes over the span.
    ///
    /// The slope is clamped at 0. Where the spread `δ − γ` is below `τ2 − τ1`, the formula would reverse the order of
    /// the scores; here it flattens them to `γ − τ1` instead. A span whose scores are all equal, such as a single
    /// token, also gets slope 0 and goes to `γ − τ1`, as in the formula. Otherwise its slope would be about 1e8, and
    /// the sum of product and offset would be rounding error.
    pub fn map(&self, smallest: f32, largest: f32) -> ScoreMap {
        let (low, high) = (smallest - self.tau1, largest - self.tau2);
        if smallest == largest {
            return ScoreMap { slope: 0.0, offset: low };
        }
        let slope = ((high - low) / (largest - smallest + 1e-8)).max(0.0);
        ScoreMap { slope, offset: low - slope * smallest }
    }
}

/// `score ↦ slope · score + offset`.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct ScoreMap {
    /// Factor of the score.
    pub slope: f32,
    /// Added after the product. It matters: softmax ignores an offset within one segment, but not across segments.
    pub offset: f32,
}

impl ScoreMap {
    /// Leaves scores unchanged.
    pub const IDENTITY: Self = Self { slope: 1.0, offset: 0.0 };

    /// The mapped score.
    pub fn apply(&self, score: f32) -> f32 {
        self.slope * score + self.offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_move_by_tau() {
        let map = Calibration::new(1.0, 3.0).unwrap().map(-4.0, 6.0);
        assert!((map.apply(-4.0) + 5.0).abs() < 1e-5);
        assert!((map.apply(6.0) - 3.0).abs() < 1e-5);
    }

    #[test]
    fn a_narrow_span_is_flattened_not_reversed() {
        let map = Calibration::new(0.0, 3.0).unwrap().map(1.0, 2.0);
        assert_eq!(map.slope, 0.0);
        assert_eq!(map.apply(1.5), 1.0);
    }

    #[test]
    fn equal_scores_go_to_the_lower_end() {
        let map = Calibration::new(2.0, 0.0).unwrap().map(7.3, 7.3);
        assert_eq!(map.apply(7.3), 7.3 - 2.0);
    }

    #[test]
    fn negative_offsets_are_refused() {
        assert!(Calibration::new(-1.0, 0.0).is_err());
        assert!(Calibration::new(0.0, f32::NAN).is_err());
    }
}
