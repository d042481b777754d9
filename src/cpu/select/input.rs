//! The input of attention statistics.

use crate::cpu::dense::read_row;
use crate::format::AttentionShape;
use crate::plan::{Elements, RowLayout, TokenRange};
use crate::policy::QueryPositions;
use crate::{Error, Result};

/// Rows of a dense tensor, with their layout.
#[derive(Clone, Copy, Debug)]
pub struct DenseRows<'a> {
    /// The elements.
    pub elements: Elements<'a>,
    /// Layout of the rows.
    pub layout: RowLayout,
}

impl DenseRows<'_> {
    /// The rows of one head for `tokens` as f32, `[tokens, head_dim]`.
    pub(super) fn of_head(&self, head: usize, head_dim: usize, tokens: TokenRange) -> Vec<f32> {
        let mut rows = vec![0.0; tokens.len() * head_dim];
        for (token, row) in (tokens.start()..tokens.end()).zip(rows.chunks_exact_mut(head_dim)) {
            read_row(self.elements, self.layout.row(token, head), row);
        }
        rows
    }
}

/// Query rows and their keys.
#[derive(Clone, Copy, Debug)]
pub struct StatsInput<'a> {
    /// Heads.
    pub shape: AttentionShape,
    /// Factor on `q·k`.
    pub scale: f32,
    /// Positions of the query rows in the context.
    pub rows: &'a QueryPositions,
    /// The query rows `[rows, query_heads, head_dim]`, one for each position.
    pub queries: DenseRows<'a>,
    /// All keys of the context, `[tokens, kv_heads, head_dim]`.
    pub keys: DenseRows<'a>,
}

impl StatsInput<'_> {
    /// Checks that tensors and layouts hold the rows.
    ///
    /// # Errors
    /// [`Error::NoTokens`], [`Error::Elements`]; [`Error::Selection`] when there is not one query row per position and
    /// one key per token, or the range of keys reaches beyond them.
    pub fn check(&self, keys: TokenRange) -> Result<()> {
        self.rows.check_tensors(self.queries.layout.tokens, self.keys.layout.tokens)?;
        let heads = self.shape.query_heads();
        let query_shape = AttentionShape::new(heads, heads, self.shape.head_dim())?;
        self.queries.layout.check("query rows", self.queries.elements.len(), &query_shape)?;
        self.keys.layout.check("keys", self.keys.elements.len(), &self.shape)?;
        let tokens = self.keys.layout.tokens;
        if keys.end() > tokens {
            let reason = format!("keys {}..{} of {tokens}", keys.start(), keys.end());
            return Err(Error::Selection { reason });
        }
        Ok(())
    }

    /// Calls `visit` for every row of a query head, with the scaled scores of the keys that it sees within a range.
    pub(super) fn scores_of_head(&self, query_head: usize, range: TokenRange, mut visit: impl FnMut(usize, &[f64])) {
        let head_dim = self.shape.head_dim();
        let keys = self.keys.of_head(query_head / self.shape.group(), head_dim, range);
        let mut query = vec![0.0; head_dim];
        let mut scores = Vec::with_capacity(range.len());
        for (row, &position) in self.rows.positions().iter().enumerate() {
            read_row(self.queries.elements, self.queries.layout.row(row, query_head), &mut query);
            let visible = (position as usize + 1).saturating_sub(range.start()).min(range.len());
            scores.clear();
            scores
                .extend(keys.chunks_exact(head_dim).take(visible).map(|key| dot(&query, key) * f64::from(self.scale)));
            visit(row, &scores);
        }
    }
}

/// Σ a · b of f32 rows, summed in f64.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}
