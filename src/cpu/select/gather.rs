//! Kernel `gather`: the kept tokens of every KV head, in the order of their positions.

use rayon::prelude::*;

use super::input::DenseRows;
use crate::cpu::CpuTensor;
use crate::format::AttentionShape;
use crate::plan::Elements;
use crate::{Error, Result};

/// Copies the rows `kept`, `[kv_heads, k]`, of each KV head to `[kv_heads, k, head_dim]`. The element type stays the
/// same.
///
/// # Errors
/// [`Error::NoTokens`] or [`Error::Elements`] when the tensor does not fit its layout; [`Error::Selection`] when heads
/// have different numbers of indices, or an index names a token that does not exist.
pub fn gather(shape: &AttentionShape, rows: DenseRows<'_>, kept: &[u32]) -> Result<CpuTensor> {
    rows.layout.check("rows to gather", rows.elements.len(), shape)?;
    check_indices(kept, shape.kv_heads(), rows.layout.tokens)?;
    let count = kept.len() / shape.kv_heads();
    let row = |i: usize| rows.layout.row(kept[i] as usize, i / count);
    Ok(copy_rows(rows.elements, kept.len(), shape.head_dim(), row))
}

/// Checks that every KV head has the same number of `indices`, all below `tokens`.
pub(crate) fn check_indices(indices: &[u32], kv_heads: usize, tokens: usize) -> Result<()> {
    if !indices.len().is_multiple_of(kv_heads) {
        let reason = format!("{} indices for {kv_heads} KV heads; every head needs the same number", indices.len());
        return Err(Error::Selection { reason });
    }
    match indices.iter().find(|&&index| index as usize >= tokens) {
        Some(index) => Err(Error::Selection { reason: format!("token {index} of {tokens}") }),
        None => Ok(()),
    }
}

/// `count` rows, the i-th of which begins at element `start(i)`.
pub(super) fn copy_rows(
    elements: Elements<'_>,
    count: usize,
    head_dim: usize,
    start: impl Fn(usize) -> usize + Sync,
) -> CpuTensor {
    fn copied<T: Copy + Send + Sync>(
        x: &[T],
        count: usize,
        dim: usize,
        start: impl Fn(usize) -> usize + Sync,
    ) -> Vec<T> {
        (0..count).into_par_iter().flat_map_iter(|i| x[start(i)..][..dim].iter().copied()).collect()
    }
    match elements {
        Elements::F32(x) => CpuTensor::F32(copied(x, count, head_dim, start)),
        Elements::F16(x) => CpuTensor::F16(copied(x, count, head_dim, start)),
        Elements::Bf16(x) => CpuTensor::Bf16(copied(x, count, head_dim, start)),
    }
}
