//! Kernel `merge_tokens`: merges evicted rows into kept ones.

use rayon::prelude::*;

use super::input::DenseRows;
use super::nearest_kept::KeptTokens;
use crate::cpu::dense::read_row;
use crate::format::AttentionShape;
use crate::policy::{Merging, Nearest};
use crate::{Error, Result};

/// The kept rows of every KV head, `[kv_heads, k, head_dim]`. Every evicted row is merged into its `nearest` kept row
/// (LOOK-M eq. 10-12, [`Merging`]). Rows are keys or values: values follow the assignment of their keys. Evicted rows
/// are merged in the given order.
///
/// # Errors
/// [`Error::NoTokens`] or [`Error::Elements`] when the rows do not fit their layout; [`Error::Selection`] when the
/// indices do not fit, or there is not one assignment per evicted token.
pub fn merge_tokens(
    shape: &AttentionShape,
    rows: DenseRows<'_>,
    tokens: KeptTokens<'_>,
    nearest: &[Nearest],
    merging: Merging,
) -> Result<Vec<f32>> {
    rows.layout.check("rows to merge", rows.elements.len(), shape)?;
    tokens.check(shape.kv_heads(), rows.layout.tokens)?;
    let (k, e) = (tokens.kept.len() / shape.kv_heads(), tokens.evicted.len() / shape.kv_heads());
    if nearest.len() != tokens.evicted.len() {
        let reason = format!("{} evicted tokens, but assignments for {}", tokens.evicted.len(), nearest.len());
        return Err(Error::Selection { reason });
    }
    if let Some(nearest) = nearest.iter().find(|nearest| nearest.kept as usize >= k) {
        return Err(Error::Selection { reason: format!("a token merges into kept token {} of {k}", nearest.kept) });
    }
    let mut members: Vec<Vec<usize>> = vec![Vec::new(); tokens.kept.len()];
    for (i, nearest) in nearest.iter().enumerate() {
        members[i / e * k + nearest.kept as usize].push(i);
    }
    let head_dim = shape.head_dim();
    let mut merged = vec![0.0f32; tokens.kept.len() * head_dim];
    merged.par_chunks_exact_mut(head_dim).zip(&members).enumerate().for_each(|(i, (merged, members))| {
        let head = i / k;
        read_row(rows.elements, rows.layout.row(tokens.kept[i] as usize, head), merged);
        if members.is_empty() {
            return;
        }
        let own = merging.own_weight(members.len());
        let mut sum: Vec<f64> = merged.iter().map(|&x| own * f64::from(x)).collect();
        let mut row = vec![0.0; head_dim];
        for &member in members {
            read_row(rows.elements, rows.layout.row(tokens.evicted[member] as usize, head), &mut row);
            let weight = merging.weight(nearest[member].similarity, members.len());
            sum.iter_mut().zip(&row).for_each(|(sum, &x)| *sum += weight * f64::from(x));
        }
        merged.iter_mut().zip(sum).for_each(|(merged, sum)| *merged = sum as f32);
    });
    Ok(merged)
}
