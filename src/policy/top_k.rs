//! The best scores of a head.

use crate::counts::{TokenCount, collected, reserved};
use crate::{Error, Result};

/// Indices of the `k` largest scores, ascending. Ties go to the lower indices. Infinite scores are ranked like all
/// others.
///
/// # Errors
/// [`Error::TopK`] when there are fewer than `k`; [`Error::NotANumber`] when one is NaN.
pub fn top_k(scores: &[f32], k: usize) -> Result<Vec<u32>> {
    if k > scores.len() {
        return Err(Error::TopK { k, n: scores.len() });
    }
    Ok(best(&ranks(scores)?, k))
}

/// Above the rank of every score.
pub(super) const HIGHEST_RANK: u32 = u32::MAX;

/// Integers in the order of the scores; −0 equals +0. Selecting among integers is faster than among floats.
///
/// # Errors
/// [`Error::NotANumber`] when a score is NaN; [`Error::Limit`] when there are more scores than positions.
pub(super) fn ranks(scores: &[f32]) -> Result<Vec<u32>> {
    TokenCount::new(scores.len())?;
    if let Some(index) = scores.iter().position(|score| score.is_nan()) {
        return Err(Error::NotANumber { what: "scores", index });
    }
    let rank = |score: &f32| {
        // −0 + 0 = +0.
        let bits = (score + 0.0).to_bits();
        if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
    };
    collected("ranks of scores", scores.iter().map(rank))
}

/// Indices of the `k` largest ranks, ascending. There are at least `k` ranks, and no more than positions. Ties go to
/// the lower indices.
pub(super) fn best(ranks: &[u32], k: usize) -> Vec<u32> {
    let Some(last) = k.checked_sub(1) else { return Vec::new() };
    let mut order = ranks.to_vec();
    let (above, &mut least, _) = order.select_nth_unstable_by(last, |a, b| b.cmp(a));
    // The number of ranks equal to the least one that stay.
    let mut equal = k - above.iter().filter(|&&rank| rank > least).count();
    let mut chosen = Vec::with_capacity(k);
    for (index, &rank) in (0..).zip(ranks) {
        if rank > least {
            chosen.push(index);
        } else if rank == least && equal > 0 {
            equal -= 1;
            chosen.push(index);
        }
    }
    chosen
}

/// The positions of `0 .. tokens` that are not in `kept`, which ascends.
///
/// # Errors
/// [`Error::Selection`] when the kept positions do not ascend or do not exist; [`Error::Limit`] when there are more
/// than [`MOST_TOKENS`](crate::plan::MOST_TOKENS); [`Error::OutOfMemory`] when the host has no memory for the evicted
/// ones.
pub fn evicted(kept: &[u32], tokens: usize) -> Result<Vec<u32>> {
    let count = TokenCount::new(tokens)?;
    if kept.windows(2).any(|pair| pair[0] >= pair[1]) {
        return Err(Error::Selection { reason: "kept positions must ascend".into() });
    }
    if let Some(&last) = kept.last().filter(|&&last| last as usize >= tokens) {
        return Err(Error::Selection { reason: format!("token {last} is kept, but there are {tokens} tokens") });
    }
    let mut others = reserved("evicted tokens", tokens - kept.len())?;
    let mut kept = kept.iter().peekable();
    others.extend(count.positions().filter(|position| kept.next_if_eq(&position).is_none()));
    Ok(others)
}
