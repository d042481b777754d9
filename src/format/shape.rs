//! The shape of an attention layer.

use super::{HEAD_DIMS, MOST_HEADS};
use crate::{Error, Result};

/// Query heads, KV heads and head dimension of one attention layer, checked.
///
/// Query head `h` reads KV head `h / group()`: grouped-query attention with any group size, from multi-head
/// attention (group 1) to multi-query attention (one KV head).
///
/// ```
/// let shape = kvpack::AttentionShape::new(32, 8, 128)?;
/// assert_eq!(shape.group(), 4);
/// assert!(kvpack::AttentionShape::new(32, 5, 128).is_err());
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    query_heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl AttentionShape {
    /// Creates a shape after checking it.
    ///
    /// # Errors
    /// [`Error::HeadCounts`] when a count is zero or above [`MOST_HEADS`], or `query_heads` is not a multiple of
    /// `kv_heads`; [`Error::HeadDim`] when `head_dim` is not one of [`HEAD_DIMS`].
    pub fn new(query_heads: usize, kv_heads: usize, head_dim: usize) -> Result<Self> {
        let counted = |heads| (1..=MOST_HEADS).contains(&heads);
        if !counted(kv_heads) || !counted(query_heads) || !query_heads.is_multiple_of(kv_heads) {
            return Err(Error::HeadCounts { query_heads, kv_heads });
        }
        if !HEAD_DIMS.contains(&head_dim) {
            return Err(Error::HeadDim { given: head_dim });
        }
        Ok(Self { query_heads, kv_heads, head_dim })
    }

    /// Query heads (`Hq`).
    pub const fn query_heads(&self) -> usize {
        self.query_heads
    }

    /// KV heads (`Hkv`).
    pub const fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Channels of one head (`D`).
    pub const fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Query heads that share one KV head (`G = Hq / Hkv`).
    pub const fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }
}
