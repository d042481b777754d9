//! Checks of the kernels that measure attention and choose, gather, merge and reorder tokens, against the CPU
//! reference.

mod chunks;
mod eviction;
mod statistics;
mod token_scores;
mod top_k;

pub(super) use chunks::run as run_chunks;
pub use chunks::{ChunksCase, chunks_cases};
pub(super) use eviction::run as run_eviction;
pub use eviction::{EvictionCase, EvictionKeys, eviction_cases};
pub(super) use statistics::run as run_statistics;
pub use statistics::{StatisticsCase, statistics_cases};
pub(super) use token_scores::run as run_token_scores;
pub use token_scores::{TokenScoresCase, token_scores_cases};
pub(super) use top_k::run as run_top_k;
pub use top_k::{Scores, TopKCase, top_k_cases};

use super::data::Random;
use super::report::Failure;

/// Numbers of about unit variance that every element type holds exactly.
fn exact_numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    let mut sixteenths = || (0..4).map(|_| random.below(17) as f32 - 8.0).sum::<f32>();
    (0..count).map(|_| sixteenths() / 16.0).collect()
}

/// The element with the largest deviation from the CPU reference, if it exceeds `tolerance · (1 + |want|)`.
pub(super) fn far(what: &str, got: &[f32], want: &[f32], tolerance: f64) -> Option<Failure> {
    if got.len() != want.len() {
        return super::pack::difference(what, got, want);
    }
    let error = |(got, want): (&f32, &f32)| {
        let error = (f64::from(*got) - f64::from(*want)).abs() / (1.0 + f64::from(want.abs()));
        // Infinities of the same sign are equal.
        if got == want {
            0.0
        } else if error.is_nan() {
            f64::INFINITY
        } else {
            error
        }
    };
    let error = got.iter().zip(want).map(error).fold(0.0, f64::max);
    (error > tolerance).then(|| Failure::Inaccurate { what: what.into(), error, limit: tolerance })
}
