//! Lloyd-Max codebooks for rotated rows (TurboQuant, arXiv 2504.19874).
//!
//! A randomly rotated row is a point on a sphere. Each of its channels, divided by the norm of the row, follows one
//! known density, whatever the data were: `(1 − x²)^((d−3)/2)` up to a factor. One codebook per width and head
//! dimension therefore serves all channels of all rows, and the only range of a row is its norm.
//!
//! Levels are symmetric about 0: code `2^(bits−1) + i` is level `i` above 0, and code `2^(bits−1) − 1 − i` is its
//! negative.

use super::Bits;

/// The coordinate density for which a codebook is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CoordinateDensity {
    /// A coordinate of a uniformly random unit vector of this dimension.
    Sphere(usize),
    /// A normal distribution of variance 1/dimension, which approximates the sphere.
    Gaussian(usize),
}

/// Levels of a codebook, symmetric about 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Codebook {
    centroids: Vec<f32>,
    boundaries: Vec<f32>,
}

impl Codebook {
    /// The codebook that formats of this width use at this head dimension. `None` if `head_dim` has no kernels or the
    /// width has no codebook (8 bits).
    ///
    /// The levels are half-integer multiples of a unit, `±(step + ½) · unit` with steps below 128, so that kernels
    /// multiply them as signed bytes. They are close to those of [`Codebook::lloyd_max`] for
    /// [`CoordinateDensity::Sphere`]: the mean squared error exceeds the minimum by 0.001 % at 1 and 2 bits, 0.06 % at
    /// 3 and 0.5 % at 4.
    pub fn of_format(bits: Bits, head_dim: usize) -> Option<Self> {
        let upper = upper_levels(bits, head_dim)?;
        Some(Self::symmetric(upper.iter().map(|&x| f64::from(x)).collect()))
    }

    /// The codebook of `2^bits` levels with the least mean squared error for a density (Lloyd 1982, Max 1960). It is
    /// the fixed point at which every boundary is midway between its levels and every level is the mean of its cell.
    /// Computed in f64.
    ///
    /// `bits` is 1 to 8. The dimension is 3 to 65,536, where the two densities are hard to tell apart. Other arguments
    /// are clamped to these ranges.
    pub fn lloyd_max(bits: u32, density: CoordinateDensity) -> Self {
        let density = Density::new(density);
        let mut levels = density.first_levels(1 << (bits.clamp(1, 8) - 1));
        for _ in 0..MOST_ITERATIONS {
            let next = density.next_levels(&levels);
            let moved = levels.iter().zip(&next).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            levels = next;
            // Far below what f32 tells apart; rounding moves 128 levels by a tenth of it.
            if moved < 1e-11 * density.sigma {
                break;
            }
        }
        Self::symmetric(levels)
    }

    /// A codebook of given levels, ascending. Boundaries are midway.
    pub fn from_centroids(centroids: Vec<f32>) -> Self {
        let boundaries = centroids.windows(2).map(|pair| (pair[0] + pair[1]) * 0.5).collect();
        Self { centroids, boundaries }
    }

    /// Builds the codebook from the levels above 0.
    fn symmetric(upper: Vec<f64>) -> Self {
        let lower = upper.iter().rev().map(|&x| -x as f32);
        Self::from_centroids(lower.chain(upper.iter().map(|&x| x as f32)).collect())
    }

    /// The levels, ascending.
    pub fn centroids(&self) -> &[f32] {
        &self.centroids
    }

    /// The boundaries between the cells of neighbouring levels, ascending.
    pub fn boundaries(&self) -> &[f32] {
        &self.boundaries
    }

    /// The code of the level nearest to `x`, as a multiple of `norm`. A boundary belongs to the lower level. 0 for norm
    /// 0.
    ///
    /// Compares with products `norm · boundary` that are rounded once, so every IEEE machine decides alike.
    pub fn encode(&self, x: f32, norm: f32) -> u32 {
        if norm == 0.0 {
            return 0;
        }
        self.boundaries.iter().filter(|&&boundary| x > norm * boundary).count() as u32
    }

    /// The value of a code; `None` if there is no such level.
    pub fn decode(&self, code: u32, norm: f32) -> Option<f32> {
        self.centroids.get(code as usize).map(|level| norm * level)
    }
}

/// The norm of a row as it is stored: the f16 nearest to the root of the sum of squares, ties to even; at most 65504,
/// and 0 or 2^-14, whichever is nearer, where f16 would be subnormal.
///
/// Subnormal norms would be finer, but WGSL lets a device read a subnormal f16 as 0. A norm is multiplied by levels
/// below 1, so a row below 2^-15 that is stored as zeros is off by its own length, less than 2^-15.
///
/// The sum is part of the format: squares below 2^-100 count as 0; of four neighbouring channels the first two squares
/// and the last two are added, then their sums, and those of all fours from the first to the last, in f32. The root is
/// decided by comparing the sum with the squares of the midpoints between halves, which are exact in f32.
pub fn stored_norm(row: &[f32]) -> half::f16 {
    nearest_root(sum_of_squares(row), 1.0)
}

/// The norm of a row over that of its levels, which makes the levels as long as the row, rounded as
/// [`stored_norm`] does.
///
/// The square of the norm is exact in f32, the squares of the levels are summed as those of a row, and the root of the
/// quotient is decided by comparing the former with the products, rounded to f32, of the sum and the
/// squares of midpoints.
pub fn renormalized(norm: half::f16, levels: &[f32]) -> half::f16 {
    nearest_root(norm.to_f32() * norm.to_f32(), sum_of_squares(levels))
}

fn sum_of_squares(row: &[f32]) -> f32 {
    let square = |x: f32| if x.abs() < SMALLEST { 0.0 } else { x * x };
    let of_four = |x: &[f32; 4]| (square(x[0]) + square(x[1])) + (square(x[2]) + square(x[3]));
    row.as_chunks::<4>().0.iter().fold(0.0, |sum, four| sum + of_four(four))
}

/// The f16 nearest to the root of `sum / divisor`, ties to even; 0 or 2^-14 where f16 would be subnormal.
fn nearest_root(sum: f32, divisor: f32) -> half::f16 {
    let half = half::f16::from_f32((sum / divisor).sqrt().min(half::f16::MAX.to_f32())).to_bits();
    // The square of the midpoint between a half and the next, times the divisor.
    let above = |bits: u16| {
        let middle = (half::f16::from_bits(bits).to_f32() + half::f16::from_bits(bits + 1).to_f32()) * 0.5;
        middle * middle * divisor
    };
    let odd = half % 2 == 1;
    let decided = if half > 0 && (sum < above(half - 1) || (sum == above(half - 1) && odd)) {
        half - 1
    } else if half < half::f16::MAX.to_bits() && (sum > above(half) || (sum == above(half) && odd)) {
        half + 1
    } else {
        half
    };
    match half::f16::from_bits(decided) {
        norm if norm >= half::f16::MIN_POSITIVE => norm,
        norm if norm >= NORM_ROUNDED_UP => half::f16::MIN_POSITIVE,
        _ => half::f16::ZERO,
    }
}

/// Half of the smallest normal f16, 2^-15: smaller norms are stored as 0.
const NORM_ROUNDED_UP: half::f16 = half::f16::from_bits(0x200);

/// Elements below this count as 0 in a norm: 2^-50.
const SMALLEST: f32 = f32::from_bits((127 - 50) << 23);

const MOST_ITERATIONS: usize = 1000;
const MOST_DIMENSIONS: usize = 1 << 16;

/// A density on the positive half-line, up to a factor.
struct Density {
    of: CoordinateDensity,
    /// Exponent of 1 − x² on a sphere.
    exponent: f64,
    /// Standard deviation.
    sigma: f64,
    /// The remaining tail beyond this point is negligible.
    end: f64,
}

impl Density {
    fn new(of: CoordinateDensity) -> Self {
        let (dimension, end) = match of {
            CoordinateDensity::Sphere(d) => (d.clamp(3, MOST_DIMENSIONS), 1.0),
            CoordinateDensity::Gaussian(d) => (d.clamp(3, MOST_DIMENSIONS), f64::INFINITY),
        };
        let sigma = 1.0 / (dimension as f64).sqrt();
        Self { of, exponent: (dimension as f64 - 3.0) / 2.0, sigma, end: (10.0 * sigma).min(end) }
    }

    fn at(&self, x: f64) -> f64 {
        match self.of {
            CoordinateDensity::Sphere(_) => (1.0 - x * x).max(0.0).powf(self.exponent),
            CoordinateDensity::Gaussian(_) => (-0.5 * (x / self.sigma).powi(2)).exp(),
        }
    }

    /// Levels near the best ones, `count` above 0: where many levels are, their density is the cube root of that of the
    /// coordinate (Panter and Dite 1951).
    fn first_levels(&self, count: usize) -> Vec<f64> {
        const STEPS: usize = 4096;
        let at = |step: usize| (step as f64 + 0.5) / STEPS as f64 * self.end;
        let mut sum = 0.0;
        let sums: Vec<f64> = (0..STEPS)
            .map(|step| {
                sum += self.at(at(step)).cbrt();
                sum
            })
            .collect();
        (0..count).map(|i| at(sums.partition_point(|&below| below < (i as f64 + 0.5) / count as f64 * sum))).collect()
    }

    /// One step towards the fixed point: Newton's, whose equations are tridiagonal, as the mean of a cell moves with
    /// the level and its two neighbours alone. Where that would leave the order of the levels, the means themselves
    /// (Lloyd's), which come nearer from everywhere and take hundreds of thousands of steps at 8 bits.
    fn next_levels(&self, levels: &[f64]) -> Vec<f64> {
        let last = levels.len() - 1;
        let cells: Vec<Cell> = (0..=last)
            .map(|i| {
                let low = if i == 0 { 0.0 } else { (levels[i - 1] + levels[i]) / 2.0 };
                let high = if i == last { self.end } else { (levels[i] + levels[i + 1]) / 2.0 };
                self.cell(low, high)
            })
            .collect();
        // Elimination from the first level to the last: `above` is what is left of the coefficient of the next one.
        let mut eliminated: Vec<(f64, f64)> = Vec::with_capacity(levels.len());
        for (i, cell) in cells.iter().enumerate() {
            let below = if i == 0 { 0.0 } else { -0.5 * cell.per_low };
            let above = if i == last { 0.0 } else { -0.5 * cell.per_high };
            let (above_before, moved_before) = eliminated.last().copied().unwrap_or((0.0, 0.0));
            let own = 1.0 + below + above - below * above_before;
            eliminated.push((above / own, (cell.mean - levels[i] - below * moved_before) / own));
        }
        let mut next = levels.to_vec();
        let mut moved = 0.0;
        for (level, &(above, own)) in next.iter_mut().zip(&eliminated).rev() {
            moved = own - above * moved;
            *level += moved;
        }
        let sound = next[0] > 0.0 && next[last] < self.end && next.windows(2).all(|pair| pair[0] < pair[1]);
        if sound { next } else { cells.iter().map(|cell| cell.mean).collect() }
    }

    /// The mean over a cell, by Simpson's rule.
    fn cell(&self, low: f64, high: f64) -> Cell {
        const STEPS: usize = 256;
        let step = (high - low) / STEPS as f64;
        let (mut mass, mut moment) = (0.0, 0.0);
        for i in 0..=STEPS {
            let x = low + i as f64 * step;
            let weight = match i {
                0 | STEPS => 1.0,
                i if i % 2 == 1 => 4.0,
                _ => 2.0,
            };
            mass += weight * self.at(x);
            moment += weight * self.at(x) * x;
        }
        let (mean, mass) = (moment / mass, mass * step / 3.0);
        Cell { mean, per_low: self.at(low) * (mean - low) / mass, per_high: self.at(high) * (high - mean) / mass }
    }
}

/// The mean of a density over a cell, and how it moves with the ends of the cell.
struct Cell {
    mean: f64,
    per_low: f64,
    per_high: f64,
}

/// The levels above 0 of a width at a head dimension, ascending: `(step + ½) · unit`.
pub(crate) fn upper_levels(bits: Bits, head_dim: usize) -> Option<Vec<f32>> {
    let (steps, unit) = (level_steps(bits)?, level_unit(bits, head_dim)?);
    Some(steps.iter().map(|&step| (f32::from(step) + 0.5) * unit).collect())
}

/// The steps of the levels above 0: exclusive ors of constants that the bits of the index choose
/// (`shaders/attend/codes.wgsl#level_bytes`).
const fn level_steps(bits: Bits) -> Option<&'static [u8]> {
    match bits {
        Bits::One => Some(&[0]),
        Bits::Two => Some(&[18, 61]),
        Bits::Three => Some(&[12, 39, 69, 110]),
        Bits::Four => Some(&[4, 13, 22, 31, 41, 53, 68, 88]),
        Bits::Eight => None,
    }
}

/// The value of one step, chosen for the least mean squared error under the density of [`CoordinateDensity::Sphere`].
pub(crate) fn level_unit(bits: Bits, head_dim: usize) -> Option<f32> {
    let dimension = super::HEAD_DIMS.into_iter().position(|served| served == head_dim)?;
    let units: [f32; 5] = match bits {
        Bits::One => [0.20025182, 0.17897082, 0.16329218, 0.14132315, 0.09983302],
        Bits::Two => [0.0030487292, 0.0027306597, 0.0024950493, 0.002163277, 0.0015323219],
        Bits::Three => [0.0023883614, 0.0021421919, 0.0019605076, 0.0017032468, 0.0012089283],
        Bits::Four => [0.0037191221, 0.0033442986, 0.003_062_829, 0.0026639833, 0.0018950998],
        Bits::Eight => return None,
    };
    Some(units[dimension])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::HEAD_DIMS;
    use proptest::prelude::*;

    /// The mean squared error of a codebook, relative to the density's power.
    fn distortion(codebook: &Codebook, head_dim: usize) -> f64 {
        const STEPS: usize = 40_000;
        let density = Density::new(CoordinateDensity::Sphere(head_dim));
        let (mut error, mut power) = (0.0, 0.0);
        for i in 0..STEPS {
            let x = (i as f64 + 0.5) / STEPS as f64 * density.end;
            let level = f64::from(codebook.decode(codebook.encode(x as f32, 1.0), 1.0).unwrap());
            error += density.at(x) * (x - level).powi(2);
            power += density.at(x) * x * x;
        }
        error / power
    }

    #[test]
    fn levels_of_formats_cost_next_to_nothing() {
        for head_dim in HEAD_DIMS {
            for (bits, most) in [(Bits::One, 1.0001), (Bits::Two, 1.0001), (Bits::Three, 1.001), (Bits::Four, 1.006)] {
                let least = Codebook::lloyd_max(bits.count(), CoordinateDensity::Sphere(head_dim));
                let stored = Codebook::of_format(bits, head_dim).unwrap();
                let loss = distortion(&stored, head_dim) / distortion(&least, head_dim);
                assert!((0.9999..most).contains(&loss), "{bits} bits of {head_dim}: {loss}");
            }
        }
        assert_eq!(Codebook::of_format(Bits::Eight, 64), None);
    }

    #[test]
    fn codes_are_of_the_nearest_level_and_ties_go_down() {
        let codebook = Codebook::from_centroids(vec![-3.0, -1.0, 1.0, 3.0]);
        let codes = [-9.0, -4.0, -3.9, 0.0, 0.1, 4.0, 4.1].map(|x| codebook.encode(x, 2.0));
        assert_eq!(codes, [0, 0, 1, 1, 2, 2, 3]);
        assert_eq!((codebook.decode(3, 2.0), codebook.encode(5.0, 0.0)), (Some(6.0), 0));
        assert_eq!((codebook.decode(4, 2.0), codebook.decode(u32::MAX, 2.0)), (None, None));
    }

    #[test]
    fn norms_at_the_ends_of_f16() {
        let norm = |x: f32| stored_norm(&[x, 0.0, 0.0, 0.0]).to_f32();
        let smallest = half::f16::MIN_POSITIVE.to_f32();
        assert_eq!(norm(1e6), 65504.0);
        assert_eq!(norm(65519.0), 65504.0);
        assert_eq!([6.2e-5, 6.1035156e-5, 6e-5, 3.0517578e-5].map(norm), [6.198883e-5, smallest, smallest, smallest]);
        assert_eq!(norm(3.04e-5), 0.0);
        assert_eq!(norm(1e-30), 0.0);
    }

    /// Midway between two halves the even one is taken, whichever of the two the root is nearer to
    /// before it is decided.
    #[test]
    fn norms_midway_between_halves_are_even() {
        for bits in [0x3c00u16, 0x3c01, 0x3c02, 0x3c03, 0x4201, 0x4202] {
            let [low, high] = [bits, bits + 1].map(half::f16::from_bits);
            // The square of `middle` is exact.
            let middle = (low.to_f32() + high.to_f32()) * 0.5;
            assert_eq!(f64::from(middle * middle), f64::from(middle).powi(2));
            assert_eq!(stored_norm(&[middle, 0.0, 0.0, 0.0]).to_bits(), bits + bits % 2, "{bits:x}");
        }
    }

    proptest! {
        /// The stored norm is the rounded norm wherever the rounding is not in doubt.
        #[test]
        fn norms_are_nearest(row in prop::collection::vec(-10f32..10.0, 64)) {
            let exact = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            let norm = stored_norm(&row).to_f64();
            prop_assert!((norm / exact - 1.0).abs() < 4.9e-4, "{norm} {exact}");
        }

        /// A norm that is a half is stored unchanged.
        #[test]
        fn halves_are_their_own_norms(bits in 0x0400u16..0x7bff) {
            let half = half::f16::from_bits(bits);
            prop_assert_eq!(stored_norm(&[0.0, half.to_f32(), 0.0, 0.0]), half);
        }
    }
}
