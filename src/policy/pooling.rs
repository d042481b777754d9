//! Smooths scores over neighbouring tokens, so that neighbours are kept together (SnapKV).

use crate::{Error, Result};

/// How the scores of neighbouring tokens are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pool {
    /// Their sum divided by the full width of the pooling, even where that reaches beyond the first or last token.
    Average,
    /// The largest.
    Max,
}

/// Pooling over the neighbours of each token, with the token in the middle (SnapKV).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pooling {
    pool: Pool,
    kernel: usize,
}

impl Pooling {
    /// The largest width. Kernels count tokens in 32 bits, also those of a window behind the last token.
    const LARGEST: usize = (1 << 31) - 1;

    /// Pooling over `kernel` neighbouring tokens; 1 changes nothing.
    ///
    /// # Errors
    /// [`Error::Budget`] when the width is even, and therefore has no middle, or is more than 2^31 − 1.
    pub fn new(pool: Pool, kernel: usize) -> Result<Self> {
        if kernel.is_multiple_of(2) || kernel > Self::LARGEST {
            let (given, allowed) = (kernel.to_string(), format!("an odd number of tokens up to {}", Self::LARGEST));
            return Err(Error::Budget { what: "width of the pooling", given, allowed });
        }
        Ok(Self { pool, kernel })
    }

    /// How neighbours are combined.
    pub const fn pool(&self) -> Pool {
        self.pool
    }

    /// Number of pooled tokens: the neighbours on both sides and the token in the middle.
    pub const fn width(&self) -> usize {
        self.kernel
    }

    /// Pools the scores of one head. Where one of its neighbours is NaN, a token has NaN.
    pub fn apply(&self, scores: &[f32]) -> Vec<f32> {
        let half = self.kernel / 2;
        let pooled = |token: usize| {
            let near = &scores[token.saturating_sub(half)..scores.len().min(token + half + 1)];
            match self.pool {
                Pool::Average => (near.iter().map(|&x| f64::from(x)).sum::<f64>() / self.kernel as f64) as f32,
                // `f32::max` loses NaN.
                Pool::Max => near.iter().copied().fold(f32::NEG_INFINITY, larger),
            }
        };
        (0..scores.len()).map(pooled).collect()
    }
}

/// The larger of two numbers, or NaN if one is.
const fn larger(most: f32, x: f32) -> f32 {
    if x > most || x.is_nan() { x } else { most }
}
