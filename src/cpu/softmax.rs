//! The online softmax over consecutive tiles.

use super::simd::{Kernel, dispatch, multiply_add};

/// Running maximum and sum of the weights of one query head.
///
/// Weights are relative to the running maximum. When a tile raises it, the earlier sums are scaled down.
#[derive(Clone, Copy, Debug)]
pub(super) struct OnlineSoftmax {
    max: f32,
    sum: f64,
}

impl OnlineSoftmax {
    pub(super) const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Turns the scores of a tile into weights and returns the rescale factor of everything weighted before.
    pub(super) fn weigh(&mut self, scores: &mut [f32]) -> f64 {
        let max = scores.iter().copied().fold(self.max, larger);
        let factor = f64::from(self.max - max).exp();
        self.max = max;
        let mut sum = 0.0;
        dispatch(Exponentials { scores, max, sum: &mut sum });
        self.sum = self.sum * factor + f64::from(sum);
        factor
    }

    /// Sum of all weights.
    pub(super) fn sum(&self) -> f64 {
        self.sum
    }

    /// Natural logarithm of the sum of the exponentials of all scores.
    pub(super) fn log_sum_exp(&self) -> f32 {
        (f64::from(self.max) + self.sum.ln()) as f32
    }
}

/// The larger of two numbers. NaN if one of them is, unlike `f32::max`, so that an error stays visible.
pub(super) fn larger(a: f32, b: f32) -> f32 {
    if a >= b || a.is_nan() { a } else { b }
}

/// Replaces scores by `exp(score − max)` and sums them.
struct Exponentials<'a> {
    scores: &'a mut [f32],
    max: f32,
    sum: &'a mut f32,
}

impl Kernel for Exponentials<'_> {
    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let mut sums = [0.0f32; 8];
        let (chunks, rest) = self.scores.as_chunks_mut::<8>();
        for chunk in chunks {
            for (score, sum) in chunk.iter_mut().zip(&mut sums) {
                *score = exponential::<FMA>(*score - self.max);
                *sum += *score;
            }
        }
        for (score, sum) in rest.iter_mut().zip(&mut sums) {
            *score = exponential::<FMA>(*score - self.max);
            *sum += *score;
        }
        *self.sum = sums.iter().sum();
    }
}

/// `e^x` for x ≤ 0 to about one unit in the last place, without branches. Below −87 it stays at e^−87. NaN stays NaN.
#[inline(always)]
fn exponential<const FMA: bool>(x: f32) -> f32 {
    // ln 2 in two parts; the first has so few bits that its product with the exponent is exact.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding this leaves the nearest integer in the low bits of the sum.
    const INTEGER: f32 = 12_582_912.0;
    let x = if x < -87.0 { -87.0 } else { x };
    let shifted = multiply_add::<FMA>(x, std::f32::consts::LOG2_E, INTEGER);
    let integer = shifted - INTEGER;
    let rest = multiply_add::<FMA>(integer, -LN2_LOW, multiply_add::<FMA>(integer, -LN2_HIGH, x));
    let mut series = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        series = multiply_add::<FMA>(series, rest, coefficient);
    }
    let exponent = shifted.to_bits().wrapping_sub(INTEGER.to_bits()).wrapping_add(127);
    series * f32::from_bits(exponent << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_are_accurate() {
        for i in 0..87_000 {
            let x = -(i as f32) * 1e-3;
            let exact = f64::from(x).exp();
            for y in [exponential::<false>(x), exponential::<true>(x)] {
                assert!((f64::from(y) / exact - 1.0).abs() < 3e-7, "{x}: {y} {exact}");
            }
        }
    }

    #[test]
    fn tiles_in_any_order_give_the_same_sum() {
        let mut softmax = OnlineSoftmax::EMPTY;
        for tile in [[1.0, -2.0, 0.5], [30.0, 29.0, -50.0], [3.0, 2.0, 1.0]] {
            softmax.weigh(&mut tile.clone());
        }
        let exact = [1.0f64, -2.0, 0.5, 30.0, 29.0, -50.0, 3.0, 2.0, 1.0].map(f64::exp).iter().sum::<f64>().ln();
        assert!((f64::from(softmax.log_sum_exp()) - exact).abs() < 1e-5);
    }
}
