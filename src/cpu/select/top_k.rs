//! Kernel `top_k`: the best scores of every KV head.

use rayon::prelude::*;

use crate::counts::{TokenCount, collected};
use crate::{Error, Result};

/// Indices of the `k` largest of `scores`, `[kv_heads, n]`, for every head: `[kv_heads, k]`, ascending, so that rows
/// gathered with them stay in the order of positions. Ties go to the lower indices, and −0 equals +0. NaN ranks below
/// −∞, because a kernel on a device cannot report it ([`policy::top_k`](crate::policy::top_k) does).
///
/// # Errors
/// [`Error::Elements`] when the scores are not whole heads; [`Error::TopK`] when a head has fewer than `k`.
pub fn top_k(scores: &[f32], kv_heads: usize, k: usize) -> Result<Vec<u32>> {
    if kv_heads == 0 || !scores.len().is_multiple_of(kv_heads) {
        let (given, expected) = (scores.len(), scores.len() / kv_heads.max(1) * kv_heads);
        return Err(Error::Elements { what: "scores", given, expected, shape: format!("[{kv_heads}, n]") });
    }
    let n = scores.len() / kv_heads;
    let tokens = TokenCount::new(n)?;
    if k > n {
        return Err(Error::TopK { k, n });
    }
    if k == 0 {
        return Ok(Vec::new());
    }
    let best = |scores: &[f32]| -> Result<Vec<u32>> {
        let mut order = collected("tokens of a head", tokens.positions())?;
        order.select_nth_unstable_by_key(k - 1, |&i| (std::cmp::Reverse(rank(scores[i as usize])), i));
        order.truncate(k);
        order.sort_unstable();
        Ok(order)
    };
    let heads: Vec<Vec<u32>> = scores.par_chunks_exact(n).map(best).collect::<Result<_>>()?;
    Ok(heads.concat())
}

/// A number that has the order of [`top_k`]. Equal scores give equal numbers.
fn rank(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits(); // −0 + 0 = +0
    match () {
        () if score.is_nan() => 0,
        () if bits >> 31 == 1 => !bits,
        () => bits | 1 << 31,
    }
}
