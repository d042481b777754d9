//! Rotations of the channels of a head: blocked, normalised Walsh-Hadamard transforms.
//!
//! A rotation spreads the content of one channel over all channels of its block. A range over a token's channels is
//! then not stretched by a few outlier channels (SAW-INT4), and every channel of a token has the same distribution
//! (TurboQuant). Queries rotated like the keys give the same scores, and a weighted sum of rotated values is rotated
//! back once: nothing is undone per token.

use std::fmt;

use super::AttentionShape;
use crate::{Error, Result};

/// An orthonormal rotation of the channels of a head.
///
/// The row is cut into blocks of `order` neighbouring channels, and each block is multiplied with the Walsh-Hadamard
/// matrix in natural (Sylvester) order over `√order`. That matrix is symmetric and its own inverse.
///
/// A *randomised* rotation first flips the signs of some channels: `y = H (s ⊙ x)`, `x = s ⊙ (H y)`. The signs are a
/// fixed function of seed and channel, see [`Rotation::flips`].
///
/// A rotation of *dealt* channels first deals the channels out to the blocks in turns, so that its blocks mix channels
/// from different blocks of another rotation: of m blocks, channel c goes to block c % m, place c / m. Signs then
/// belong to places.
///
/// The arithmetic is part of the format, and every backend reproduces it bit for bit. Elements below 2^-50 count as 0.
/// Each element is multiplied by `1/√order`, rounded to f32. Then come the butterflies `(a + b, a − b)` in f32 over
/// channels 1, 2, 4, … apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotation {
    order: usize,
    seed: Option<u32>,
    dealt: bool,
}

/// The direction of a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Into the rotated channels.
    Forward,
    /// Back out of them.
    Inverse,
}

/// Smaller elements count as 0, so that no sum of a rotation, and no square of an element, is ever subnormal: 2^-50.
const SMALLEST: f32 = f32::from_bits((127 - 50) << 23);

impl Rotation {
    /// The Hadamard transform of blocks of `order` channels, a power of two from 2 to 256. Every function that rotates
    /// rows checks the order, and that it divides the row.
    pub const fn hadamard(order: usize) -> Self {
        Self { order, seed: None, dealt: false }
    }

    /// The same rotation after flipping signs that depend on `seed`.
    pub const fn randomized(order: usize, seed: u32) -> Self {
        Self { order, seed: Some(seed), dealt: false }
    }

    /// The same rotation after dealing the channels out to the blocks in turns.
    pub const fn dealt(order: usize, seed: u32) -> Self {
        Self { order, seed: Some(seed), dealt: true }
    }

    /// The largest order that divides a head: 64, 16, 32, 128 and 256 for head_dim 64, 80, 96, 128 and 256.
    pub const fn largest_order(head_dim: usize) -> usize {
        head_dim & head_dim.wrapping_neg()
    }

    /// Channels of a block.
    pub const fn order(&self) -> usize {
        self.order
    }

    /// Number of blocks that the channels of a head are dealt out to; 1 if they keep their order.
    pub const fn dealt_blocks(&self, head_dim: usize) -> usize {
        match head_dim.checked_div(self.order) {
            Some(blocks) if self.dealt => blocks,
            _ => 1,
        }
    }

    /// The seed of the signs, if signs are flipped.
    pub const fn seed(&self) -> Option<u32> {
        self.seed
    }

    /// The factor of every element before the butterflies: `1/√order`, rounded to f32.
    pub fn scale(&self) -> f32 {
        (1.0 / (self.order as f64).sqrt()) as f32
    }

    /// Whether the sign of `channel` is flipped: the lowest bit of `mix(seed + 0x9e3779b9 · (channel + 1))`. `mix` xors
    /// a word with itself shifted right by 16, multiplies by 0x7feb352d, xors with itself shifted by 15, multiplies by
    /// 0x846ca68b and xors with itself shifted by 16, all modulo 2^32.
    pub const fn flips(&self, channel: u32) -> bool {
        let Some(seed) = self.seed else { return false };
        let mut x = seed.wrapping_add(0x9e37_79b9u32.wrapping_mul(channel.wrapping_add(1)));
        x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
        x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
        (x ^ (x >> 16)) & 1 == 1
    }

    /// Rotates a row of channels in place.
    ///
    /// ```
    /// use kvpack::format::Rotation;
    /// let mut row = [4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    /// Rotation::hadamard(4).rotate(&mut row)?;
    /// assert_eq!(row, [2.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]);
    /// Rotation::hadamard(4).unrotate(&mut row)?;
    /// assert_eq!(row[0], 4.0);
    /// # Ok::<(), kvpack::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Format`] when the order is not a power of two from 2 to 256, or does not divide the row.
    pub fn rotate(&self, row: &mut [f32]) -> Result<()> {
        self.turn(Direction::Forward, row)
    }

    /// Rotates a row of channels back, in place.
    ///
    /// # Errors
    /// As [`Rotation::rotate`].
    pub fn unrotate(&self, row: &mut [f32]) -> Result<()> {
        self.turn(Direction::Inverse, row)
    }

    /// Rotates a row in either direction.
    ///
    /// # Errors
    /// As [`Rotation::rotate`].
    pub fn turn(&self, direction: Direction, row: &mut [f32]) -> Result<()> {
        self.check_head_dim(row.len())?;
        self.turn_checked(direction, row);
        Ok(())
    }

    /// Rotates a row whose head dimension was checked.
    pub(crate) fn turn_checked(&self, direction: Direction, row: &mut [f32]) {
        match direction {
            Direction::Forward => self.forth(row),
            Direction::Inverse => self.back(row),
        }
    }

    fn forth(&self, row: &mut [f32]) {
        if self.dealt {
            let channels = row.to_vec();
            channels.iter().enumerate().for_each(|(channel, &x)| row[self.place(channel, channels.len())] = x);
        }
        self.flip_signs(row);
        self.transform(row);
    }

    fn back(&self, row: &mut [f32]) {
        self.transform(row);
        self.flip_signs(row);
        if self.dealt {
            let places = row.to_vec();
            row.iter_mut().enumerate().for_each(|(channel, x)| *x = places[self.place(channel, places.len())]);
        }
    }

    /// The place that a channel is dealt to.
    const fn place(&self, channel: usize, head_dim: usize) -> usize {
        let blocks = self.dealt_blocks(head_dim);
        channel % blocks * self.order + channel / blocks
    }

    fn flip_signs(&self, row: &mut [f32]) {
        if self.seed.is_some() {
            (0..).zip(row).filter(|(channel, _)| self.flips(*channel)).for_each(|(_, x)| *x = -*x);
        }
    }

    fn transform(&self, row: &mut [f32]) {
        let scale = self.scale();
        row.iter_mut().for_each(|x| *x = if x.abs() < SMALLEST { 0.0 } else { *x * scale });
        for block in row.chunks_exact_mut(self.order) {
            let mut half = 1;
            while half < self.order {
                for pair in block.chunks_exact_mut(2 * half) {
                    let (low, high) = pair.split_at_mut(half);
                    for (a, b) in low.iter_mut().zip(high) {
                        (*a, *b) = (*a + *b, *a - *b);
                    }
                }
                half *= 2;
            }
        }
    }

    /// Checks that heads of `shape` can be rotated this way.
    ///
    /// # Errors
    /// [`Error::Format`] when the order is not a power of two from 2 to 256, or does not divide `head_dim`.
    pub fn check(&self, shape: &AttentionShape) -> Result<()> {
        self.check_head_dim(shape.head_dim())
    }

    pub(crate) fn check_head_dim(&self, head_dim: usize) -> Result<()> {
        let fits = self.order.is_power_of_two() && (2..=256).contains(&self.order);
        if fits && head_dim > 0 && head_dim.is_multiple_of(self.order) {
            return Ok(());
        }
        Err(Error::Format {
            format: self.to_string(),
            reason: format!(
                "the order must be a power of two from 2 to 256 that divides head_dim {head_dim}; the largest is {}",
                Self::largest_order(head_dim)
            ),
        })
    }
}

impl fmt::Display for Rotation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.seed {
            None => write!(f, "Hadamard {}", self.order),
            Some(_) if self.dealt => write!(f, "randomised Hadamard {} of dealt channels", self.order),
            Some(_) => write!(f, "randomised Hadamard {}", self.order),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::HEAD_DIMS;
    use proptest::prelude::*;

    /// Elements below 2^-50 count as 0 before anything is summed.
    #[test]
    fn what_is_too_small_counts_as_zero() {
        let smallest = 2f32.powi(-50);
        for (x, kept) in [(smallest, true), (-smallest, true), (0.99 * smallest, false), (-1e-30, false)] {
            let mut row = [x, 0.0, 0.0, 0.0];
            Rotation::hadamard(4).rotate(&mut row).unwrap();
            assert_eq!(row, [if kept { 0.5 * x } else { 0.0 }; 4], "{x}");
        }
    }

    #[test]
    fn rows_of_the_matrix_are_walsh_functions() {
        for order in [2, 16, 64] {
            for row in 0..order {
                let mut x = vec![0.0; order];
                x[row] = 1.0;
                Rotation::hadamard(order).rotate(&mut x).unwrap();
                for (column, &x) in x.iter().enumerate() {
                    let sign = if (row & column).count_ones() % 2 == 0 { 1.0 } else { -1.0 };
                    assert_eq!(x, sign * Rotation::hadamard(order).scale());
                }
            }
        }
    }

    #[test]
    fn orders_that_do_not_fit_are_refused() {
        let shape = AttentionShape::new(1, 1, 80).unwrap();
        assert!(Rotation::hadamard(16).check(&shape).is_ok());
        for order in [0, 1, 3, 32, 80, 512] {
            for rotation in [Rotation::hadamard(order), Rotation::randomized(order, 1), Rotation::dealt(order, 1)] {
                assert!(rotation.check(&shape).is_err(), "{order}");
                let mut row = [1.0; 80];
                assert!(rotation.rotate(&mut row).is_err() && rotation.unrotate(&mut row).is_err(), "{order}");
                assert_eq!(row, [1.0; 80]);
                assert!(rotation.dealt_blocks(80) <= 80);
            }
        }
        assert_eq!(HEAD_DIMS.map(Rotation::largest_order), [64, 16, 32, 128, 256]);
    }

    /// Every block of a rotation of dealt channels has channels of every block of the other.
    #[test]
    fn dealt_channels_mix_blocks() {
        let rotation = Rotation::dealt(16, 0);
        let mut places: Vec<usize> = (0..80).map(|channel| rotation.place(channel, 80)).collect();
        let first: Vec<usize> = (0..16).map(|channel| places[channel] / 16).collect();
        assert_eq!(first[..6], [0, 1, 2, 3, 4, 0]);
        places.sort_unstable();
        assert_eq!(places, (0..80).collect::<Vec<_>>());
        assert_eq!((rotation.place(77, 16), rotation.dealt_blocks(64)), (77, 4));
    }

    #[test]
    fn about_half_of_the_signs_are_flipped() {
        for seed in 0..20 {
            let flips = (0..256).filter(|&channel| Rotation::randomized(256, seed).flips(channel)).count();
            assert!((96..=160).contains(&flips), "{flips} of seed {seed}");
        }
    }

    /// The signs are part of the format. These channels were computed separately from the formula of
    /// [`Rotation::flips`].
    #[test]
    fn signs_are_those_of_the_contract() {
        let wanted: [(u32, &[usize]); 3] = [
            (0, &[2, 3, 4, 5, 9, 15, 17, 18, 19, 21, 28, 29]),
            (7, &[0, 1, 9, 13, 15, 20, 25, 28, 29, 30]),
            (0x7475_7262, &[3, 4, 5, 6, 7, 9, 12, 15, 17, 19, 21, 22, 23, 27, 29, 30]),
        ];
        for (seed, flipped) in wanted {
            let rotation = Rotation::randomized(32, seed);
            for channel in 0..32 {
                // The row of a single channel becomes a column of the matrix, whose first entry is positive if no sign
                // is flipped.
                let mut row = [0.0; 32];
                row[channel] = 1.0;
                rotation.rotate(&mut row).unwrap();
                assert_eq!(row[0] < 0.0, flipped.contains(&channel), "seed {seed}, channel {channel}");
                rotation.unrotate(&mut row).unwrap();
                assert!((row[channel] - 1.0).abs() < 1e-5, "seed {seed}, channel {channel}");
            }
        }
    }

    proptest! {
        #[test]
        fn rotating_keeps_the_norm_and_comes_back(
            row in prop::collection::vec(-100f32..100.0, 256),
            power in 1u32..9,
            seed in prop::option::of(any::<u32>()),
            dealt in any::<bool>(),
        ) {
            let rotation = Rotation { order: 1 << power, seed, dealt };
            let norm = |x: &[f32]| x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
            let mut turned = row.clone();
            rotation.rotate(&mut turned).unwrap();
            prop_assert!((norm(&turned) / norm(&row) - 1.0).abs() < 1e-5);
            rotation.unrotate(&mut turned).unwrap();
            prop_assert!(turned.iter().zip(&row).all(|(a, b)| (a - b).abs() < 1e-3));
        }
    }
}
