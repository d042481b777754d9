//! The tokens of dense tensors that a write takes: consecutive ones, or a gather with indices for each KV head.

use super::{RowLayout, TokenRange};
use crate::format::{AttentionShape, MOST_HEADS};
use crate::{Error, Result};

/// The facts that a backend knows about an index tensor without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IndexShape {
    kv_heads: usize,
    count: usize,
    below: u32,
}

impl IndexShape {
    /// `[kv_heads, count]` token numbers, all below `below`.
    ///
    /// # Errors
    /// [`Error::NoTokens`] when there are none; [`Error::Limit`] for more than [`MOST_HEADS`] heads, or more indices
    /// than 32 bits can count.
    pub fn new(kv_heads: usize, count: usize, below: u32) -> Result<Self> {
        if kv_heads == 0 || count == 0 || below == 0 {
            return Err(Error::NoTokens { what: "token indices", hint: "gather at least one token for every KV head" });
        }
        let limit = |what: &str, needed: u64, allowed: u64, hint| match needed > allowed {
            true => Err(Error::Limit { what: what.into(), needed, allowed, hint }),
            false => Ok(()),
        };
        let indices = (kv_heads as u64).saturating_mul(count as u64);
        limit("KV heads of token indices", kv_heads as u64, MOST_HEADS as u64, "a layer has no more")?;
        limit("token indices", indices, u64::from(u32::MAX), "pass fewer tokens at once")?;
        Ok(Self { kv_heads, count, below })
    }

    /// The shape of token numbers in host memory, `[kv_heads, count]`.
    ///
    /// # Errors
    /// [`Error::NoTokens`] when there are none, [`Error::Elements`] when KV heads have different counts,
    /// [`Error::Plan`] names the first index that is not below `below`.
    pub fn of(tokens: &[u32], kv_heads: usize, below: u32) -> Result<Self> {
        let shape = Self::new(kv_heads, tokens.len().div_ceil(kv_heads.max(1)), below)?;
        if shape.indices() != tokens.len() {
            let (given, expected) = (tokens.len(), shape.indices());
            let shape = format!("[{kv_heads} KV heads, {} tokens]: the same number for every head", shape.count);
            return Err(Error::Elements { what: "token indices", given, expected, shape });
        }
        match tokens.iter().position(|&token| token >= below) {
            None => Ok(shape),
            Some(at) => {
                let (kv_head, place) = (at / shape.count, at % shape.count);
                let reason =
                    format!("index {place} of KV head {kv_head} is {}; they must be below {below}", tokens[at]);
                Err(Error::Plan { what: "token indices", reason })
            }
        }
    }

    /// KV heads.
    pub const fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Number of tokens of each KV head, at least 1.
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Exclusive upper bound of the indices. Kernels clamp a larger index to the largest allowed one, so that no index
    /// on a device reaches beyond the rows, whatever wrote it.
    pub const fn below(&self) -> u32 {
        self.below
    }

    /// The shape of the complement below [`IndexShape::below`], provided that the indices of a head are distinct.
    ///
    /// # Errors
    /// [`Error::NoTokens`] when it is empty, [`Error::Limit`] when it has more tokens than 32 bits can count.
    pub fn others(&self) -> Result<Self> {
        Self::new(self.kv_heads, (self.below as usize).saturating_sub(self.count), self.below)
    }

    /// Total number of indices over all KV heads.
    pub const fn indices(&self) -> usize {
        self.kv_heads * self.count
    }
}

/// An index tensor of a backend: token numbers `[kv_heads, count]` on its device.
pub trait TokenIndices {
    /// Its shape, and the bound of its indices.
    fn shape(&self) -> IndexShape;
}

/// Tokens of dense tensors, in the order in which they are stored.
#[derive(Debug)]
pub enum Rows<'a, I> {
    /// The same consecutive tokens for every KV head.
    Run(TokenRange),
    /// For every KV head the tokens that its indices name: the same number for each, in any order.
    Gather(&'a I),
}

impl<I> Clone for Rows<'_, I> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<I> Copy for Rows<'_, I> {}

impl<I> From<TokenRange> for Rows<'_, I> {
    fn from(run: TokenRange) -> Self {
        Self::Run(run)
    }
}

impl<I: TokenIndices> Rows<'_, I> {
    /// Number of tokens, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "there is always a token")]
    pub fn len(&self) -> usize {
        match self {
            Self::Run(run) => run.len(),
            Self::Gather(indices) => indices.shape().count(),
        }
    }

    /// Checks that tensors with these rows hold the tokens.
    ///
    /// # Errors
    /// [`Error::Plan`] when the range ends beyond the rows, or the indices are for another number of KV heads or may
    /// lie beyond the rows.
    pub fn check(&self, what: &'static str, rows: &RowLayout, shape: &AttentionShape) -> Result<()> {
        let reject = |reason: String| Err(Error::Plan { what, reason });
        match self {
            Self::Run(run) if run.end() > rows.tokens => {
                reject(format!("tokens up to {} of tensors that have {} tokens", run.end(), rows.tokens))
            }
            Self::Gather(indices) if indices.shape().kv_heads() != shape.kv_heads() => reject(format!(
                "indices for {} KV heads; the layer has {}",
                indices.shape().kv_heads(),
                shape.kv_heads()
            )),
            Self::Gather(indices) if indices.shape().below() as usize > rows.tokens => {
                let below = indices.shape().below();
                reject(format!("indices below {below} of tensors with {} tokens", rows.tokens))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Indices(IndexShape);

    impl TokenIndices for Indices {
        fn shape(&self) -> IndexShape {
            self.0
        }
    }

    #[test]
    fn indices_are_as_many_for_every_head_and_below_the_limit() {
        let shape = IndexShape::of(&[3, 0, 2, 2], 2, 4).unwrap();
        assert_eq!((shape.kv_heads(), shape.count(), shape.below()), (2, 2, 4));
        assert!(matches!(IndexShape::of(&[1, 2, 3], 2, 4), Err(Error::Elements { .. })));
        assert!(matches!(IndexShape::of(&[], 2, 4), Err(Error::NoTokens { .. })));
        assert!(matches!(IndexShape::of(&[0], 0, 4), Err(Error::NoTokens { .. })));
        let beyond = IndexShape::of(&[3, 0, 2, 4], 2, 4).unwrap_err();
        assert!(beyond.to_string().contains("index 1 of KV head 1 is 4"), "{beyond}");
    }

    /// Products of these sizes would wrap around to small numbers.
    #[test]
    fn absurd_shapes_are_refused() {
        let wraps = (0x0fff_ffff_0000_0010_u64 as usize, 0x1000_0001);
        for (kv_heads, count) in [wraps, (usize::MAX, usize::MAX), (2, usize::MAX)] {
            assert!(matches!(IndexShape::new(kv_heads, count, 1), Err(Error::Limit { .. })), "{kv_heads}, {count}");
        }
        assert!(matches!(IndexShape::new(MOST_HEADS + 1, 1, 1), Err(Error::Limit { .. })));
        assert!(IndexShape::new(MOST_HEADS, 1, 1).is_ok());
        assert!(matches!(IndexShape::new(MOST_HEADS, 1, u32::MAX).unwrap().others(), Err(Error::Limit { .. })));
    }

    #[test]
    fn rows_hold_the_tokens() {
        let shape = AttentionShape::new(2, 2, 64).unwrap();
        let rows = RowLayout::token_major(4, &shape);
        let gathered = |kv_heads, below| Indices(IndexShape::new(kv_heads, 3, below).unwrap());
        let check = |rows_of: Rows<'_, Indices>| rows_of.check("test", &rows, &shape);
        assert!(check(Rows::Gather(&gathered(2, 4))).is_ok());
        assert!(check(Rows::Gather(&gathered(2, 5))).is_err());
        assert!(check(Rows::Gather(&gathered(1, 4))).is_err());
        assert!(check(Rows::Run(TokenRange::new(1, 4).unwrap())).is_ok());
        assert!(check(Rows::Run(TokenRange::new(1, 5).unwrap())).is_err());
        assert_eq!(Rows::Gather(&gathered(2, 4)).len(), 3);
    }
}
