//! Kernel `nearest_kept`: finds the nearest kept token of every evicted token.

use rayon::prelude::*;

use super::gather::check_indices;
use super::input::{DenseRows, dot};
use crate::counts::TokenCount;
use crate::cpu::dense::read_row;
use crate::format::AttentionShape;
use crate::policy::Nearest;
use crate::{Error, Result};

/// The kept and the evicted tokens of every KV head.
#[derive(Clone, Copy, Debug)]
pub struct KeptTokens<'a> {
    /// Positions `[kv_heads, k]` of the kept tokens.
    pub kept: &'a [u32],
    /// Positions `[kv_heads, e]` of the evicted ones.
    pub evicted: &'a [u32],
}

impl KeptTokens<'_> {
    /// Checks that all heads have the same numbers of existing tokens, and some kept ones if there are evicted ones.
    ///
    /// # Errors
    /// [`Error::Selection`].
    pub fn check(&self, kv_heads: usize, tokens: usize) -> Result<()> {
        check_indices(self.kept, kv_heads, tokens)?;
        check_indices(self.evicted, kv_heads, tokens)?;
        if self.kept.is_empty() && !self.evicted.is_empty() {
            return Err(Error::Selection { reason: "no kept token remains for evicted tokens to merge into".into() });
        }
        Ok(())
    }
}

/// The kept token with the largest cosine similarity for every evicted one, `[kv_heads, e]` (LOOK-M eq. 9). Ties go to
/// the first. A key of zeros has similarity 0 with every key.
///
/// # Errors
/// [`Error::NoTokens`] or [`Error::Elements`] when the keys do not fit their layout; as [`KeptTokens::check`].
pub fn nearest_kept(shape: &AttentionShape, keys: DenseRows<'_>, tokens: KeptTokens<'_>) -> Result<Vec<Nearest>> {
    keys.layout.check("keys", keys.elements.len(), shape)?;
    tokens.check(shape.kv_heads(), keys.layout.tokens)?;
    let head_dim = shape.head_dim();
    let row = |token: u32, head: usize| {
        let mut row = vec![0.0f32; head_dim];
        read_row(keys.elements, keys.layout.row(token as usize, head), &mut row);
        row
    };
    let (k, e) = (tokens.kept.len() / shape.kv_heads(), tokens.evicted.len() / shape.kv_heads());
    TokenCount::new(k)?;
    let mut found = Vec::with_capacity(tokens.evicted.len());
    for head in 0..shape.kv_heads() {
        let unit = |&token: &u32| {
            let row = row(token, head);
            let inverse = inverse_norm(&row);
            row.into_iter().map(|x| (f64::from(x) * inverse) as f32).collect::<Vec<f32>>()
        };
        let kept: Vec<Vec<f32>> = tokens.kept[head * k..][..k].iter().map(unit).collect();
        let nearest = |&token: &u32| {
            let row = row(token, head);
            let inverse = inverse_norm(&row);
            let mut nearest = Nearest { kept: 0, similarity: f32::NEG_INFINITY };
            for (i, kept) in (0..).zip(&kept) {
                let similarity = (dot(&row, kept) * inverse) as f32;
                if similarity > nearest.similarity {
                    nearest = Nearest { kept: i, similarity };
                }
            }
            nearest
        };
        found.par_extend(tokens.evicted[head * e..][..e].par_iter().map(nearest));
    }
    Ok(found)
}

/// 1 / ‖row‖, or 0 for a row of zeros.
fn inverse_norm(row: &[f32]) -> f64 {
    let norm = dot(row, row).sqrt();
    if norm > 0.0 { 1.0 / norm } else { 0.0 }
}
