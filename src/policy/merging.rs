//! Merging of evicted tokens into the kept token with the nearest key (LOOK-M).

use super::selection::Merge;
use crate::{Error, Result};

/// How c evicted rows e merge into p, the kept row nearest to them (LOOK-M eq. 9-12).
///
/// Keys decide which kept token is nearest. Values follow the assignment of their keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Merging {
    /// `(p + Σ e) / (c + 1)`.
    Averaged,
    /// `(p + Σ (e + p) / 2) / (c + 1)`: gives the kept row more weight.
    #[default]
    Pivotal,
    /// `(p + Σ s · e) / (c + 1)` with the cosine similarity s of the keys.
    Weighted,
}

/// The kept token nearest to an evicted one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nearest {
    /// Index into the kept tokens of the head.
    pub kept: u32,
    /// Cosine similarity of the keys.
    pub similarity: f32,
}

impl Merging {
    /// Weight of a kept row into which `count` evicted rows merge; 1 if there are none.
    pub fn own_weight(self, count: usize) -> f64 {
        let count = count as f64;
        match self {
            Self::Averaged | Self::Weighted => 1.0 / (count + 1.0),
            Self::Pivotal => (1.0 + 0.5 * count) / (count + 1.0),
        }
    }

    /// Weight of one of `count` evicted rows, given the similarity of its key.
    pub fn weight(self, similarity: f32, count: usize) -> f64 {
        let weight = match self {
            Self::Averaged => 1.0,
            Self::Pivotal => 0.5,
            Self::Weighted => f64::from(similarity),
        };
        weight / (count as f64 + 1.0)
    }
}

/// Merges of one head. Every kept token into which others merge has an entry for itself and one for each of them, so
/// that the merged row is `Σ weight · row(from)`. Entries are in the order of the kept tokens, then of `from`.
///
/// `nearest` has one entry per evicted token, both in order.
///
/// # Errors
/// [`Error::Selection`] when the numbers of entries differ, or an entry names a kept token that does not exist;
/// [`Error::NotANumber`] when a similarity is NaN, and [`Error::Selection`] when one is infinite.
pub fn merge_plan(kept: &[u32], evicted: &[u32], nearest: &[Nearest], merging: Merging) -> Result<Vec<Merge>> {
    if evicted.len() != nearest.len() {
        let reason = format!("{} evicted tokens, but nearest kept tokens for {}", evicted.len(), nearest.len());
        return Err(Error::Selection { reason });
    }
    let mut members: Vec<Vec<(u32, f32)>> = vec![Vec::new(); kept.len()];
    for (index, (&from, nearest)) in evicted.iter().zip(nearest).enumerate() {
        if nearest.similarity.is_nan() {
            return Err(Error::NotANumber { what: "similarities", index });
        }
        if nearest.similarity.is_infinite() {
            let reason = format!("the similarity of evicted token {from} is {}; it must be finite", nearest.similarity);
            return Err(Error::Selection { reason });
        }
        let Some(members) = members.get_mut(nearest.kept as usize) else {
            let reason = format!("token {from} is nearest to kept token {} of {}", nearest.kept, kept.len());
            return Err(Error::Selection { reason });
        };
        members.push((from, nearest.similarity));
    }
    let mut merges = Vec::new();
    for (&into, members) in kept.iter().zip(members).filter(|(_, members)| !members.is_empty()) {
        let count = members.len();
        let own = Merge { from: into, into, weight: merging.own_weight(count) as f32 };
        let other = |(from, similarity)| Merge { from, into, weight: merging.weight(similarity, count) as f32 };
        let mut of_token: Vec<Merge> = std::iter::once(own).chain(members.into_iter().map(other)).collect();
        of_token.sort_by_key(|merge| merge.from);
        merges.extend(of_token);
    }
    Ok(merges)
}
