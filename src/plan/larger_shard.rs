//! Shards that take the place of smaller ones, so that a store grows without another shard.

use crate::format::{AttentionShape, SegmentFormat};
use crate::{Error, Result};

/// A shard that is to take the place of the newest one of a store, with the memory that a backend made for it.
#[derive(Debug)]
pub struct LargerShard<M> {
    shape: AttentionShape,
    format: SegmentFormat,
    pages: u32,
    memory: M,
}

impl<M> LargerShard<M> {
    /// For a store of a shape and format.
    pub(crate) const fn new((shape, format): (AttentionShape, SegmentFormat), pages: u32, memory: M) -> Self {
        Self { shape, format, pages, memory }
    }

    /// Its pages and its memory, for such a store whose newest shard has `newest` pages.
    ///
    /// # Errors
    /// [`Error::Plan`] when the store has no shard, has another shape or format, or more pages in its newest shard.
    pub(crate) fn replacing(
        self,
        (shape, format): (&AttentionShape, &SegmentFormat),
        newest: Option<u32>,
    ) -> Result<(u32, M)> {
        let fits = (&self.shape, &self.format) == (shape, format) && newest.is_some_and(|newest| newest <= self.pages);
        if fits {
            return Ok((self.pages, self.memory));
        }
        let reason = format!(
            "a shard of {} pages of {} for a store of {format} whose newest shard has {} pages; it replaces a smaller \
             one of the store that it was made for",
            self.pages,
            self.format,
            newest.unwrap_or(0)
        );
        Err(Error::Plan { what: "shard of a store", reason })
    }
}

/// Checks that a shard of `pages` pages is larger than the newest of a store, and that there is one.
///
/// # Errors
/// [`Error::Plan`].
pub(crate) fn check_larger(newest: Option<u32>, pages: u32) -> Result<u32> {
    let reason = match newest {
        Some(newest) if newest < pages => return Ok(newest),
        Some(newest) => format!("the newest shard has {newest} pages already; ask for more than that, not {pages}"),
        None => "the store has no shard that could grow; add one".into(),
    };
    Err(Error::Plan { what: "larger shard", reason })
}
