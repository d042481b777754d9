//! Kernel `reorder_chunks`: chunks of a context in another order, what remains of the context after them.

use super::gather::copy_rows;
use super::input::DenseRows;
use crate::cpu::CpuTensor;
use crate::format::AttentionShape;
use crate::policy::ChunkSearch;
use crate::{Error, Result};

/// Copies tokens chunk by chunk: chunk i of the result, `[kv_heads, tokens, head_dim]`, is chunk `order[i]` of the input.
/// Tokens after the last whole chunk stay where they are (Cocktail, algorithm 1).
///
/// # Errors
/// [`Error::NoTokens`] or [`Error::Elements`] when the tensor does not fit its layout; as [`check_order`].
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

/// Checks that `order` names every whole chunk of a context once.
///
/// # Errors
/// [`Error::Chunks`] when it does not, or chunks of that size are not served.
pub fn check_order(tokens: usize, chunk_tokens: usize, order: &[u32]) -> Result<()> {
    let chunks = ChunkSearch::chunks(tokens, chunk_tokens)?;
    let mut seen = vec![false; chunks];
    for &chunk in order {
        match seen.get_mut(chunk as usize) {
            Some(seen) if !*seen => *seen = true,
            Some(_) => return Err(Error::Chunks { reason: format!("chunk {chunk} comes twice in the order") }),
            None => return Err(Error::Chunks { reason: format!("chunk {chunk} of {chunks}") }),
        }
    }
    match seen.iter().position(|&seen| !seen) {
        Some(chunk) => Err(Error::Chunks { reason: format!("chunk {chunk} of {chunks} is not in the order") }),
        None => Ok(()),
    }
}
