//! Kernel `reorder_chunks`: reorders the chunks of a context. The remaining tokens follow them.

use super::gather::copy_rows;
use super::input::DenseRows;
use crate::Result;
use crate::cpu::CpuTensor;
use crate::format::AttentionShape;
use crate::policy::check_order;

/// Copies tokens chunk by chunk: chunk i of the result, `[kv_heads, tokens, head_dim]`, is chunk `order[i]` of the
/// input. Tokens after the last whole chunk stay in place (Cocktail, algorithm 1).
///
/// # Errors
/// [`Error::NoTokens`](crate::Error::NoTokens) or [`Error::Elements`](crate::Error::Elements) when the tensor does not
/// fit its layout; as [`check_order`].
pub fn reorder_chunks(
    shape: &AttentionShape,
    rows: DenseRows<'_>,
    chunk_tokens: usize,
    order: &[u32],
) -> Result<CpuTensor> {
    rows.layout.check("rows to reorder", rows.elements.len(), shape)?;
    let tokens = rows.layout.tokens;
    check_order(tokens, chunk_tokens, order)?;
    let source = |token: usize| match order.get(token / chunk_tokens) {
        Some(&chunk) => chunk as usize * chunk_tokens + token % chunk_tokens,
        None => token,
    };
    let row = |i: usize| rows.layout.row(source(i % tokens), i / tokens);
    Ok(copy_rows(rows.elements, tokens * shape.kv_heads(), shape.head_dim(), row))
}
