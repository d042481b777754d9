//! The best scores of a head.

use crate::{Error, Result};

/// Indices of the `k` largest scores, ascending; of equal scores the lower indices. Infinite scores are ranked like all
/// others.
///
/// # Errors
/// [`Error::TopK`] when there are fewer than `k`; [`Error::NotANumber`] when one is NaN.
pub fn top_k(scores: &[f32], k: usize) -> Result<Vec<u32>> {
    if k > scores.len() {
        return Err(Error::TopK { k, n: scores.len() });
    }
    if let Some(index) = scores.iter().position(|score| score.is_nan()) {
        return Err(Error::NotANumber { what: "scores", index });
    }
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    // Not `total_cmp`, which would tell −0 from +0.
    let better = |&a: &u32, &b: &u32| {
        let by_score = scores[b as usize].partial_cmp(&scores[a as usize]);
        by_score.unwrap_or(std::cmp::Ordering::Equal).then(a.cmp(&b))
    };
    if 0 < k && k < order.len() {
        order.select_nth_unstable_by(k - 1, better);
    }
    order.truncate(k);
    order.sort_unstable();
    Ok(order)
}

/// The positions of `0 .. tokens` that are not among `kept`, which ascend.
pub fn evicted(kept: &[u32], tokens: usize) -> Vec<u32> {
    let mut kept = kept.iter().peekable();
    (0..tokens as u32).filter(|position| kept.next_if_eq(&position).is_none()).collect()
}
