//! Dense tensors of keys, values and queries that callers pass in.

use crate::counts::{TokenCount, saturated};
use crate::format::AttentionShape;
use crate::{Error, Result};

/// Consecutive tokens, `start .. end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenRange {
    start: usize,
    end: usize,
}

impl TokenRange {
    /// Creates a range after checking it.
    ///
    /// # Errors
    /// [`Error::NoTokens`] when `end` is not after `start`; [`Error::Limit`] when it lies beyond
    /// [`MOST_TOKENS`](super::MOST_TOKENS).
    pub fn new(start: usize, end: usize) -> Result<Self> {
        if end <= start {
            return Err(Error::NoTokens { what: "token range", hint: "the end must lie after the start" });
        }
        TokenCount::new(end)?;
        Ok(Self { start, end })
    }

    /// First token.
    pub const fn start(&self) -> usize {
        self.start
    }

    /// One past the last token.
    pub const fn end(&self) -> usize {
        self.end
    }

    /// The tokens, in 32 bits.
    pub(crate) fn positions(&self) -> std::ops::Range<u32> {
        // No range ends beyond what 32 bits can count.
        saturated(self.start)..saturated(self.end)
    }

    /// Number of tokens, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a range is never empty")]
    pub const fn len(&self) -> usize {
        self.end - self.start
    }
}

/// The layout of `[tokens, kv_heads, head_dim]` keys or values in a dense tensor, in elements. Channels of a row are
/// contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLayout {
    /// Tokens in the tensor.
    pub tokens: usize,
    /// Elements from one token to the next.
    pub token_stride: usize,
    /// Elements from one KV head to the next.
    pub head_stride: usize,
}

impl RowLayout {
    /// `[tokens, kv_heads, head_dim]`, the usual output of the K and V projections.
    pub const fn token_major(tokens: usize, shape: &AttentionShape) -> Self {
        Self { tokens, token_stride: shape.kv_heads() * shape.head_dim(), head_stride: shape.head_dim() }
    }

    /// `[kv_heads, tokens, head_dim]`, the layout of PyTorch caches.
    pub const fn head_major(tokens: usize, shape: &AttentionShape) -> Self {
        Self { tokens, token_stride: shape.head_dim(), head_stride: tokens.saturating_mul(shape.head_dim()) }
    }

    /// Index of the first channel of a row. Saturates at the largest number.
    pub const fn row(&self, token: usize, kv_head: usize) -> usize {
        token.saturating_mul(self.token_stride).saturating_add(kv_head.saturating_mul(self.head_stride))
    }

    /// Number of elements that a tensor needs to hold all rows. Saturates at the largest number, which no tensor has.
    pub const fn elements_needed(&self, shape: &AttentionShape) -> usize {
        if self.tokens == 0 {
            return 0;
        }
        self.row(self.tokens - 1, shape.kv_heads() - 1).saturating_add(shape.head_dim())
    }

    /// Checks that a tensor of `elements` elements holds all rows.
    ///
    /// # Errors
    /// [`Error::NoTokens`] or [`Error::Elements`]; [`Error::Plan`] when rows of neighbouring tokens overlap.
    pub fn check(&self, what: &'static str, elements: usize, shape: &AttentionShape) -> Result<()> {
        if self.tokens == 0 {
            return Err(Error::NoTokens { what, hint: "pass at least one token" });
        }
        // Rows that overlap could be more than the elements they lie in.
        if self.tokens > 1 && self.token_stride < shape.head_dim() {
            let (stride, head_dim) = (self.token_stride, shape.head_dim());
            let reason =
                format!("rows begin every {stride} elements; a row of {head_dim} channels must fit before the next");
            return Err(Error::Plan { what, reason });
        }
        let expected = self.elements_needed(shape);
        if elements < expected {
            return Err(Error::Elements {
                what,
                given: elements,
                expected,
                shape: format!(
                    "{} tokens × {} heads × {} channels (token stride {}, head stride {})",
                    self.tokens,
                    shape.kv_heads(),
                    shape.head_dim(),
                    self.token_stride,
                    self.head_stride
                ),
            });
        }
        Ok(())
    }
}

/// The layout of the rows `[query_heads, head_dim]` of queries or outputs in a dense tensor, in elements, if they are
/// not contiguous: the queries of a fused projection, or the heads of one rank in a tensor of all heads.
///
/// ```
/// use kvpack::AttentionShape;
/// use kvpack::plan::QueryLayout;
/// // Queries first in rows of 32 query heads, 8 key heads and 8 value heads.
/// let shape = AttentionShape::new(32, 8, 128)?;
/// let fused = QueryLayout { first: 0, stride: (32 + 8 + 8) * 128 };
/// assert_eq!(fused.elements_needed(2, &shape), fused.stride + 32 * 128);
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueryLayout {
    /// Elements before the first row; a multiple of 4.
    pub first: usize,
    /// Elements from one row to the next; a multiple of 4, and at least a row.
    pub stride: usize,
}

impl QueryLayout {
    /// Contiguous rows.
    pub const fn dense(shape: &AttentionShape) -> Self {
        Self { first: 0, stride: row_elements(shape) }
    }

    /// Index of the first element of a row.
    pub const fn row(&self, row: usize) -> usize {
        self.first.saturating_add(row.saturating_mul(self.stride))
    }

    /// Number of elements that a tensor needs to hold `rows` rows.
    pub const fn elements_needed(&self, rows: usize, shape: &AttentionShape) -> usize {
        if rows == 0 { 0 } else { self.row(rows - 1).saturating_add(row_elements(shape)) }
    }

    /// Checks that a tensor of `elements` elements holds `rows` rows. If the rows are dense, it must hold nothing else.
    ///
    /// # Errors
    /// [`Error::Elements`] when it does not, [`Error::Buffer`] when the rows overlap or do not begin at multiples of 4.
    pub fn check(&self, what: &'static str, elements: usize, rows: usize, shape: &AttentionShape) -> Result<()> {
        let dense = *self == Self::dense(shape);
        self.check_elements(what, elements, rows, shape, |expected| {
            elements == expected || (elements > expected && !dense)
        })
    }

    /// Checks that a tensor of `elements` elements holds at least `rows` rows.
    ///
    /// # Errors
    /// As [`QueryLayout::check`].
    pub fn check_room(&self, what: &'static str, elements: usize, rows: usize, shape: &AttentionShape) -> Result<()> {
        self.check_elements(what, elements, rows, shape, |expected| elements >= expected)
    }

    fn check_elements(
        &self,
        what: &'static str,
        elements: usize,
        rows: usize,
        shape: &AttentionShape,
        suffices: impl Fn(usize) -> bool,
    ) -> Result<()> {
        let Self { first, stride } = *self;
        if stride < row_elements(shape) || !stride.is_multiple_of(4) || !first.is_multiple_of(4) {
            let reason = format!(
                "rows begin at element {first} and every {stride}; both must be multiples of 4, and a row of {} query heads \
                 × {} channels must fit before the next",
                shape.query_heads(),
                shape.head_dim()
            );
            return Err(Error::Buffer { what, reason });
        }
        let expected = first
            .checked_add(rows.saturating_sub(1).saturating_mul(stride))
            .and_then(|last| last.checked_add(row_elements(shape)))
            .unwrap_or(usize::MAX);
        if suffices(expected) {
            return Ok(());
        }
        let dense = *self == Self::dense(shape);
        let mut of = format!("{rows} queries × {} query heads × {} channels", shape.query_heads(), shape.head_dim());
        if !dense {
            of += &format!(" ({first} elements before the first row, {stride} from one to the next)");
        }
        Err(Error::Elements { what, given: elements, expected, shape: of })
    }
}

const fn row_elements(shape: &AttentionShape) -> usize {
    shape.query_heads() * shape.head_dim()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_queries_must_fit() {
        let shape = AttentionShape::new(4, 2, 64).unwrap();
        let fits =
            |first, stride, elements| QueryLayout { first, stride }.check("queries", elements, 3, &shape).is_ok();
        assert!(fits(0, 256, 768) && !fits(0, 256, 767) && !fits(0, 256, 769));
        assert!(fits(128, 512, 128 + 2 * 512 + 256) && !fits(128, 512, 128 + 2 * 512 + 255));
        assert!(fits(128, 512, 2000), "what lies behind the last row does not matter");
        assert!(!fits(0, 252, 2000) && !fits(2, 512, 2000) && !fits(0, 513, 2000));
        assert!(!fits(0, usize::MAX / 4 * 4, 2000));
    }
}
