//! Checks that kernels of several backends share.

use crate::plan::{ElementType, TokenIndices};
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

/// A tensor of a device whose kernels are launched.
pub(crate) trait TypedTensor {
    /// Number of elements.
    fn elements(&self) -> usize;

    /// Their type.
    fn element_type(&self) -> ElementType;
}

/// Checks that a tensor holds as many elements as a kernel writes, of the type that it writes.
///
/// # Errors
/// [`Error::Elements`] or [`Error::Buffer`].
pub(crate) fn check_output(
    what: &'static str,
    output: &impl TypedTensor,
    expected: usize,
    element_type: ElementType,
) -> Result<()> {
    if output.elements() != expected {
        let (given, shape) = (output.elements(), "the result".into());
        return Err(Error::Elements { what, given, expected, shape });
    }
    if output.element_type() != element_type {
        let reason = format!("it holds {:?}, but the kernel writes {element_type:?}", output.element_type());
        return Err(Error::Buffer { what, reason });
    }
    Ok(())
}
