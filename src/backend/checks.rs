//! Checks that kernels of several backends share.

use crate::plan::TokenIndices;
use crate::{Error, Result};

/// Checks that a 32-bit index can count `needed` of `what`.
///
/// # Errors
/// [`Error::Limit`].
pub(crate) fn check_index(what: &str, needed: u64) -> Result<()> {
    let allowed = u64::from(u32::MAX);
    if needed <= allowed {
        return Ok(());
    }
    Err(Error::Limit { what: what.into(), needed, allowed, hint: "pass fewer tokens at once" })
}

/// Checks that there are `count` indices for each KV head.
///
/// # Errors
/// [`Error::Elements`].
pub(crate) fn check_indices(
    what: &'static str,
    indices: &impl TokenIndices,
    kv_heads: usize,
    count: usize,
) -> Result<()> {
    let given = indices.shape();
    if (given.kv_heads(), given.count()) == (kv_heads, count) {
        return Ok(());
    }
    let shape = format!("[{kv_heads}, {count}]; they are [{}, {}]", given.kv_heads(), given.count());
    Err(Error::Elements { what, given: given.indices(), expected: kv_heads * count, shape })
}
