//! Kernels that measure attention and carry out the decisions of a policy.

use std::future::Future;

use super::Storage;
use crate::counts::TokenCount;
use crate::format::AttentionShape;
use crate::plan::RowLayout;
use crate::policy::{ColumnRequest, HeadAggregation, Merging, QueryPositions, ScoreRequest, StatsRequest};
use crate::{Error, Result};

/// A dense tensor on a device, with the layout of its rows.
#[derive(Debug)]
pub struct TensorRows<'a, T> {
    /// The tensor.
    pub tensor: &'a T,
    /// Layout of the rows.
    pub layout: RowLayout,
}

impl<T> Clone for TensorRows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for TensorRows<'_, T> {}

/// Query rows and their keys.
#[derive(Debug)]
pub struct QueriesAndKeys<'a, T> {
    /// Heads.
    pub shape: AttentionShape,
    /// Factor on `q·k`: [`Scoring::scale`](crate::plan::Scoring::scale). Nothing else of a scoring is applied.
    pub scale: f32,
    /// Positions of the query rows in the context.
    pub rows: &'a QueryPositions,
    /// The query rows `[rows, query_heads, head_dim]`, one for each position.
    pub queries: TensorRows<'a, T>,
    /// All keys of the context, `[tokens, kv_heads, head_dim]`.
    pub keys: TensorRows<'a, T>,
}

impl<T> Clone for QueriesAndKeys<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for QueriesAndKeys<'_, T> {}

/// Query rows of a step, which appended a part of a prompt, and the keys of the prompt so far.
#[derive(Debug)]
pub struct NewQueries<'a, T> {
    /// Heads.
    pub shape: AttentionShape,
    /// Factor on `q·k`: [`Scoring::scale`](crate::plan::Scoring::scale). Nothing else of a scoring is applied.
    pub scale: f32,
    /// Positions of the query rows in the prompt so far. They are consecutive.
    pub rows: &'a QueryPositions,
    /// The queries of the step, `[rows of the step, query_heads, head_dim]`.
    pub queries: TensorRows<'a, T>,
    /// The first of the query rows among those of the step.
    pub first_row: usize,
    /// The natural log-sum-exps that the step wrote, f32 `[rows of the step, query_heads]`; `None` where they are to be
    /// measured.
    pub log_sum_exps: Option<&'a T>,
    /// All keys of the prompt so far, `[tokens, kv_heads, head_dim]`.
    pub keys: TensorRows<'a, T>,
    /// Tokens of the whole prompt.
    pub tokens: usize,
}

impl<T> Clone for NewQueries<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for NewQueries<'_, T> {}

impl<T> NewQueries<'_, T> {
    /// Checks that there are such rows and keys: `elements` counts those of a tensor.
    ///
    /// # Errors
    /// [`Elements`](crate::Error::Elements), [`Selection`](crate::Error::Selection), [`Plan`](crate::Error::Plan) when
    /// counts are requested of rows whose log-sum-exps are known, or the maximum over heads is, which parts do not add
    /// up to.
    pub(crate) fn check(&self, columns: &ColumnRequest, elements: impl Fn(&T) -> usize) -> Result<()> {
        TokenCount::new(self.tokens)?;
        let (heads, head_dim) = (self.shape.query_heads(), self.shape.head_dim());
        let end = self.first_row.saturating_add(self.rows.len());
        if end > self.queries.layout.tokens || self.keys.layout.tokens > self.tokens {
            let (rows, keys, tokens) = (self.queries.layout.tokens, self.keys.layout.tokens, self.tokens);
            let reason = format!("query rows up to {end} of {rows}, and {keys} keys of a prompt of {tokens}");
            return Err(Error::Selection { reason });
        }
        self.rows.check_tensors(self.rows.len(), self.keys.layout.tokens)?;
        let queries = AttentionShape::new(heads, heads, head_dim)?;
        self.queries.layout.check("query rows", elements(self.queries.tensor), &queries)?;
        self.keys.layout.check("keys", elements(self.keys.tensor), &self.shape)?;
        let given = self.log_sum_exps.map_or(usize::MAX, &elements);
        if given < end.saturating_mul(heads) {
            let (expected, shape) = (end * heads, format!("{end} rows × {heads} query heads"));
            return Err(Error::Elements { what: "log-sum-exps of rows", given, expected, shape });
        }
        let refuse = |reason: &str| Err(Error::Plan { what: "attention statistics", reason: reason.into() });
        if columns.aggregation == HeadAggregation::Max {
            return refuse("the maxima over heads of parts are not those of the whole; take the sum or the mean");
        }
        if columns.threshold.is_some() && self.log_sum_exps.is_some() {
            return refuse("counts under a threshold need the maximum of each row; leave out the log-sum-exps");
        }
        Ok(())
    }

    /// The number of sums.
    pub(crate) const fn sums(&self, columns: &ColumnRequest) -> usize {
        columns.aggregation.rows(self.shape.query_heads(), self.shape.kv_heads()) * self.tokens
    }
}

/// Attention statistics on the device. `W` is the backend's array of integers.
#[derive(Clone, Debug)]
pub struct MeasuredAttention<T, W> {
    /// The largest score of each row, f32 `[query_heads, rows]`; `None` if the log-sum-exp was given.
    pub row_max: Option<T>,
    /// The natural log-sum-exp of each row, f32 `[query_heads, rows]`; `None` if the caller gave it.
    pub row_lse: Option<T>,
    /// The attention that every key receives, f32 `[query_heads, tokens]` or `[kv_heads, tokens]`, depending on the
    /// aggregation.
    pub column_sums: T,
    /// `[query_heads, rows]`: the number of keys at or above the threshold; `None` if no count was requested.
    pub counts: Option<W>,
}

/// Statistics of query rows on the device, over the keys that they see.
#[derive(Clone, Debug)]
pub struct RowStatistics<T> {
    /// The largest score of each row, f32 `[query_heads, rows]`.
    pub max: T,
    /// The natural log-sum-exp of each row, f32 `[query_heads, rows]`.
    pub lse: T,
}

/// Keys and values of a layer, and the tokens of them that stay.
#[derive(Debug)]
pub struct KeptAndEvicted<'a, T, I> {
    /// Heads.
    pub shape: AttentionShape,
    /// Layout of keys and values in their tensors; the same for both.
    pub rows: RowLayout,
    /// The keys, `[tokens, kv_heads, head_dim]`.
    pub keys: &'a T,
    /// The values, in the same shape.
    pub values: &'a T,
    /// Positions `[kv_heads, k]` of the kept tokens.
    pub kept: &'a I,
    /// Positions `[kv_heads, e]` of the evicted ones.
    pub evicted: &'a I,
}

impl<T, I> Clone for KeptAndEvicted<'_, T, I> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, I> Copy for KeptAndEvicted<'_, T, I> {}

/// Evicted tokens merged into their nearest kept ones, on the device. `W` is the backend's array of integers.
#[derive(Clone, Debug)]
pub struct MergedTokens<T, W> {
    /// `[kv_heads, e]`: index of the nearest key among the kept tokens of the head.
    pub nearest: W,
    /// Cosine similarity of the keys, f32 `[kv_heads, e]`.
    pub similarities: T,
    /// f32 `[kv_heads, k, head_dim]`.
    pub keys: T,
    /// f32 `[kv_heads, k, head_dim]`.
    pub values: T,
}

/// Scores of tokens on a device. The best tokens stay. `W` is the backend's array of integers.
#[derive(Clone, Debug)]
pub struct ScoredTokens<T, W> {
    /// f32 `[kv_heads, tokens]`; +∞ for tokens that stay in any case.
    pub scores: T,
    /// `[kv_heads]`: the number of tokens from the head's first NaN sum to the end, or 0 without a NaN.
    pub not_numbers: W,
}

/// A device whose kernels measure attention, and choose, gather and merge tokens: they provide the measurements for a
/// [policy](crate::policy) and carry out its decisions.
///
/// Calls allocate the tensors that they return. Calls that neither upload nor download do not wait.
pub trait TokenSelection: Storage {
    /// An array of `u32` on the device: counts, places among kept tokens.
    type Words;

    /// Copies words to the host. Waits for the work that writes them.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::Error::DeviceLost).
    fn download_words(&self, words: &Self::Words) -> impl Future<Output = Result<Vec<u32>>>;

    /// Kernels `attention_row_stats`, `attention_column_stats` and `sum_partials` (VL-Cache A.5): the attention that
    /// every key receives from the query rows, and how many keys each row needs. Scores and weights never reach memory.
    /// `known_lse`, f32 `[query_heads, rows]`, is given if the request declares it known.
    ///
    /// # Errors
    /// [`Elements`](crate::Error::Elements) or [`Selection`](crate::Error::Selection) when tensors, layouts and
    /// positions do not fit, [`Budget`](crate::Error::Budget) when the threshold is not in 0 ..= 1,
    /// [`Plan`](crate::Error::Plan) when the log-sum-exp is given or missing contrary to the request, or counts are
    /// requested with a known one.
    fn measure_attention(
        &self,
        input: QueriesAndKeys<'_, Self::Tensor>,
        request: StatsRequest,
        known_lse: Option<&Self::Tensor>,
    ) -> Result<MeasuredAttention<Self::Tensor, Self::Words>>;

    /// Kernels `attention_row_stats` and `sum_partials` alone: for keys that are a part of a context. The statistics of
    /// all parts together are those of the context; [`sum_partials`](crate::cpu::sum_partials()) combines them on the
    /// host.
    ///
    /// # Errors
    /// As [`TokenSelection::measure_attention`].
    fn measure_rows(&self, input: QueriesAndKeys<'_, Self::Tensor>) -> Result<RowStatistics<Self::Tensor>>;

    /// Kernel `attention_column_stats` alone: the attention that every key of a part receives from rows whose
    /// statistics over the whole context are known. Counts are those of the part. No row statistics are returned.
    ///
    /// # Errors
    /// As [`TokenSelection::measure_attention`]; [`Elements`](crate::Error::Elements) when there is not one statistic
    /// per query head and row.
    fn measure_columns(
        &self,
        input: QueriesAndKeys<'_, Self::Tensor>,
        columns: ColumnRequest,
        rows: &RowStatistics<Self::Tensor>,
    ) -> Result<MeasuredAttention<Self::Tensor, Self::Words>>;

    /// Kernels `attention_row_stats` and `sum_partials` where log-sum-exps are not known, and `attention_column_stats`:
    /// adds the attention that keys receive from the query rows of a part to the sums of their prompt, f32
    /// `[query_heads, tokens]` or `[kv_heads, tokens]`, which are made where there are none. Returns counts
    /// `[query_heads, rows]` if they are requested.
    ///
    /// # Errors
    /// As [`TokenSelection::measure_attention`]; [`Plan`](crate::Error::Plan) when counts are requested of rows whose
    /// log-sum-exps are given, or the maximum over heads is requested.
    fn add_attention(
        &self,
        input: NewQueries<'_, Self::Tensor>,
        columns: ColumnRequest,
        sums: &mut Option<Self::Tensor>,
    ) -> Result<Option<Self::Words>>;

    /// Begins to copy arrays to the host: queues the copies behind all submitted work, and waits for nothing. What
    /// [`Storage::finish_reads`] returns are their bytes, in this order. `stores` are read by the kernels that write
    /// the words.
    ///
    /// # Errors
    /// [`NotSubmitted`](crate::Error::NotSubmitted) when an engine has encoded kernels that read the stores and not
    /// submitted them; [`OutOfMemory`](crate::Error::OutOfMemory) or [`DeviceLost`](crate::Error::DeviceLost).
    fn begin_word_reads(&self, words: &[&Self::Words], stores: &[&Self::Store]) -> Result<Self::SpanReads>;

    /// Kernel `token_scores`: the scores of tokens, computed by a policy's rules from f32 column sums `[kv_heads,
    /// tokens]`. The best of them by [`TokenSelection::top_k`] are the tokens that
    /// [`Policy::select`](crate::policy::Policy::select) keeps, unless rounding changes their order.
    ///
    /// # Errors
    /// As [`ScoreRequest::check`]: [`Elements`](crate::Error::Elements), [`Selection`](crate::Error::Selection).
    fn token_scores(
        &self,
        sums: &Self::Tensor,
        kv_heads: usize,
        request: &ScoreRequest<'_>,
    ) -> Result<ScoredTokens<Self::Tensor, Self::Words>>;

    /// Kernel `evicted`: the tokens of every KV head, below [`IndexShape::below`](crate::plan::IndexShape::below), that
    /// are not kept, ascending. `kept` ascends for each head, as [`TokenSelection::top_k`] returns it.
    ///
    /// # Errors
    /// [`NoTokens`](crate::Error::NoTokens) when all are kept.
    fn evicted(&self, kept: &Self::Indices) -> Result<Self::Indices>;

    /// Kernel `top_k`: the indices `[kv_heads, k]` of the `k` largest of f32 scores `[kv_heads, n]`, ascending for each
    /// head. Ties go to the lower index, −0 equals +0, and NaN ranks below −∞.
    ///
    /// # Errors
    /// [`Elements`](crate::Error::Elements) when the scores are not whole heads, [`TopK`](crate::Error::TopK) when a
    /// head has fewer than `k`, [`NoTokens`](crate::Error::NoTokens) when `k` is 0.
    fn top_k(&self, scores: &Self::Tensor, kv_heads: usize, k: usize) -> Result<Self::Indices>;

    /// Kernel `gather`: the rows `kept`, `[kv_heads, k]`, of each KV head as `[kv_heads, k, head_dim]`. The element
    /// type stays the same.
    ///
    /// # Errors
    /// [`Elements`](crate::Error::Elements) when the tensor is shorter than its layout says, or the indices are for
    /// another number of KV heads.
    fn gather(
        &self,
        shape: &AttentionShape,
        rows: TensorRows<'_, Self::Tensor>,
        kept: &Self::Indices,
    ) -> Result<Self::Tensor>;

    /// Kernels `nearest_kept` and `merge_tokens` (LOOK-M eq. 9-12): merges every evicted token into the kept token with
    /// the nearest key, and returns the kept keys and values. Ties go to the first. The order of the sums depends only
    /// on which tokens are merged, so two runs give the same bits.
    ///
    /// # Errors
    /// [`Elements`](crate::Error::Elements) when a tensor is shorter than its layout says, or the indices are for
    /// another number of KV heads.
    fn merge_tokens(
        &self,
        input: KeptAndEvicted<'_, Self::Tensor, Self::Indices>,
        merging: Merging,
    ) -> Result<MergedTokens<Self::Tensor, Self::Words>>;

    /// Kernel `chunk_similarity` (Cocktail eq. 1): the cosine similarities, f32 `[chunks]`, of a query's embedding
    /// `[width]` with those of chunks, `[chunks, width]`. An embedding of zeros has similarity 0. An embedding with NaN
    /// gives NaN or an error.
    ///
    /// # Errors
    /// [`Chunks`](crate::Error::Chunks) when an embedding has no elements, or the chunks do not have the query's width;
    /// [`NotANumber`](crate::Error::NotANumber) on the CPU when one holds NaN.
    fn chunk_similarity(&self, query: &Self::Tensor, chunks: &Self::Tensor) -> Result<Self::Tensor>;

    /// Kernel `reorder_chunks` (Cocktail, algorithm 1): chunk i of the result, `[kv_heads, tokens, head_dim]`, is chunk
    /// `order[i]` of the rows. Tokens after the last whole chunk stay in place.
    ///
    /// # Errors
    /// [`Chunks`](crate::Error::Chunks) when the order does not name every whole chunk once, or chunks of this size are
    /// not supported; [`Elements`](crate::Error::Elements) when the tensor is shorter than its layout requires.
    fn reorder_chunks(
        &self,
        shape: &AttentionShape,
        rows: TensorRows<'_, Self::Tensor>,
        chunk_tokens: usize,
        order: &[u32],
    ) -> Result<Self::Tensor>;
}
