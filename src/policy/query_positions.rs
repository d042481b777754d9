//! The query rows whose attention is measured.

use crate::counts::{TokenCount, collected, saturated};
use crate::plan::TokenRange;
use crate::{Error, Result};

/// Positions of query rows, ascending. A row at position p sees the keys 0 ..= p.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueryPositions {
    positions: Vec<u32>,
    tokens: TokenCount,
}

impl QueryPositions {
    /// Rows at these positions of a context of `tokens` keys.
    ///
    /// # Errors
    /// [`Error::NoTokens`] when there are none; [`Error::Selection`] when positions do not ascend or lie beyond the
    /// context; [`Error::Limit`] when there are more keys than [`MOST_TOKENS`](crate::plan::MOST_TOKENS).
    pub fn new(positions: Vec<u32>, tokens: usize) -> Result<Self> {
        if positions.is_empty() {
            return Err(Error::NoTokens { what: "query rows to measure", hint: "pass at least one row" });
        }
        let count = TokenCount::new(tokens)?;
        if let Some(pair) = positions.windows(2).find(|pair| pair[0] >= pair[1]) {
            let reason = format!("query row {} after {}: positions must ascend", pair[1], pair[0]);
            return Err(Error::Selection { reason });
        }
        match positions.last() {
            Some(&last) if last as usize >= tokens => {
                let reason = format!("a query row at position {last} of a context of {tokens} keys");
                Err(Error::Selection { reason })
            }
            _ => Ok(Self { positions, tokens: count }),
        }
    }

    /// The last `rows` positions of a context (bottom-right aligned).
    ///
    /// # Errors
    /// As [`QueryPositions::new`]; [`Error::Budget`] for more rows than keys; [`Error::OutOfMemory`] when the host has
    /// no memory for the positions.
    pub fn last(rows: usize, tokens: usize) -> Result<Self> {
        if rows > tokens {
            let (given, allowed) = (rows.to_string(), format!("1 to {tokens}, the tokens of the context"));
            return Err(Error::Budget { what: "number of query rows", given, allowed });
        }
        Self::new(collected("query rows to measure", TokenCount::new(tokens)?.last(rows))?, tokens)
    }

    /// All positions of a range, or its last `most`.
    ///
    /// # Errors
    /// As [`QueryPositions::last`].
    pub fn of_range(range: TokenRange, most: Option<usize>, tokens: usize) -> Result<Self> {
        let rows = range.len().min(most.unwrap_or(usize::MAX));
        if range.end() > tokens {
            let reason = format!("query rows up to position {} of a context of {tokens} keys", range.end());
            return Err(Error::Selection { reason });
        }
        Self::new(collected("query rows to measure", TokenCount::new(range.end())?.last(rows))?, tokens)
    }

    /// The rows as positions in a part of the context that has `keys` keys. It returns how many rows come before the
    /// first that sees a key of the part, and the other rows. `keys_until` returns how many keys of the part lie before
    /// a position. Several rows may see the same keys, so their positions in the part may be equal. `None` if no row
    /// sees any.
    ///
    /// # Errors
    /// [`Error::Limit`] when there are more keys than [`MOST_TOKENS`](crate::plan::MOST_TOKENS).
    pub(crate) fn in_part(&self, keys: usize, keys_until: impl Fn(usize) -> usize) -> Result<Option<(usize, Self)>> {
        let seen = |&position: &u32| keys_until(position as usize + 1).min(keys);
        let unseeing = self.positions.iter().take_while(|position| seen(position) == 0).count();
        let positions: Vec<u32> = self.positions[unseeing..].iter().map(|row| saturated(seen(row) - 1)).collect();
        let tokens = TokenCount::new(keys)?;
        Ok((!positions.is_empty()).then_some((unseeing, Self { positions, tokens })))
    }

    /// Number of rows, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "there is at least one row")]
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    /// Keys of the context.
    pub const fn tokens(&self) -> usize {
        self.tokens.get()
    }

    /// The positions.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// The number of keys that each row sees, summed over all rows: the denominator of counts.
    pub fn visible(&self) -> u64 {
        self.positions.iter().map(|&position| u64::from(position) + 1).sum()
    }

    /// Checks that tensors hold one query row per position, and one key per token of the context.
    ///
    /// # Errors
    /// [`Error::Selection`].
    pub fn check_tensors(&self, queries: usize, keys: usize) -> Result<()> {
        let (positions, tokens) = (self.len(), self.tokens());
        if queries == positions && keys == tokens {
            return Ok(());
        }
        let reason = format!("{queries} query rows and {keys} keys, at {positions} positions in a context of {tokens}");
        Err(Error::Selection { reason })
    }
}
