//! KV heads by rank: nothing is exchanged.

use std::ops::Range;

use crate::format::AttentionShape;
use crate::plan::{QueryLayout, RowLayout};
use crate::{Error, Result};

/// A layer whose KV heads are spread over ranks. Every rank caches its KV heads for all tokens and computes the outputs
/// of its query heads. Attention needs no exchange; the engine's output projection adds or gathers the parts, as tensor
/// parallelism does anyway.
///
/// A rank has a cache of layers of [`shape`](HeadParallel::shape). Where its keys, values, queries and outputs lie in
/// tensors of all heads, [`first_row`](HeadParallel::first_row) and [`queries`](HeadParallel::queries) name them. With
/// more ranks than KV heads use [`ContextParallel`](super::ContextParallel), alone or between the ranks of a KV head.
///
/// ```
/// use kvpack::plan::{QueryLayout, RowLayout};
/// use kvpack::ranks::HeadParallel;
/// use kvpack::AttentionShape;
/// let whole = AttentionShape::new(32, 8, 128)?;
/// let rank = HeadParallel::new(whole, 1, 4)?;
/// assert_eq!((rank.kv_heads(), rank.query_heads()), (2..4, 8..16));
/// assert_eq!(rank.shape(), AttentionShape::new(8, 2, 128)?);
/// // The outputs of this rank among those of all, one row after the other.
/// assert_eq!(rank.queries(QueryLayout::dense(&whole)), QueryLayout { first: 8 * 128, stride: 32 * 128 });
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadParallel {
    whole: AttentionShape,
    shape: AttentionShape,
    rank: usize,
}

impl HeadParallel {
    /// The part of rank `rank` of `ranks` in a layer of this shape: as many KV heads as the other ranks have.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such rank, or the KV heads are no multiple of the ranks.
    pub fn new(whole: AttentionShape, rank: usize, ranks: usize) -> Result<Self> {
        let kv_heads = whole.kv_heads();
        if rank >= ranks || !kv_heads.is_multiple_of(ranks) {
            let reason = format!(
                "rank {rank} of {ranks} for {kv_heads} KV heads; the heads must be a multiple of the ranks, and the rank \
                 below {ranks}"
            );
            return Err(Error::Plan { what: "KV heads by rank", reason });
        }
        let shape = AttentionShape::new(whole.query_heads() / ranks, kv_heads / ranks, whole.head_dim())?;
        Ok(Self { whole, shape, rank })
    }

    /// Shape of the layer on this rank.
    pub const fn shape(&self) -> AttentionShape {
        self.shape
    }

    /// Shape of the layer.
    pub const fn whole(&self) -> AttentionShape {
        self.whole
    }

    /// The KV heads of this rank.
    pub const fn kv_heads(&self) -> Range<usize> {
        let heads = self.shape.kv_heads();
        self.rank * heads..(self.rank + 1) * heads
    }

    /// The query heads of this rank.
    pub const fn query_heads(&self) -> Range<usize> {
        let heads = self.shape.query_heads();
        self.rank * heads..(self.rank + 1) * heads
    }

    /// Elements before the first key of this rank in a tensor of the keys of all heads. From there on its rows lie as
    /// `all` says. The same holds for values.
    pub const fn first_row(&self, all: &RowLayout) -> usize {
        all.row(0, self.kv_heads().start)
    }

    /// Where the queries of this rank, or its outputs, lie in a tensor of all heads whose rows lie as `all` says.
    #[must_use]
    pub const fn queries(&self, all: QueryLayout) -> QueryLayout {
        let before = self.query_heads().start * self.whole.head_dim();
        QueryLayout { first: all.first.saturating_add(before), stride: all.stride }
    }
}
