//! [`KvCache`]: the keys and values of one layer.

use std::fmt;
use std::sync::Arc;

use super::budget::Budget;
use super::change::Change;
use super::layer_reads::StoredSpan;
use super::layers::{LayerGroup, Members};
use super::prompt::check_spans;
use super::reserve::Asked;
use super::step::NewTokens;
use super::{CacheMemory, PromptSpan, Recipe, SpanPositions, TokenRun};
use crate::backend::{AttentionStates, Backend, FlaggedToken};
use crate::format::AttentionShape;
use crate::plan::{AttendPlan, ElementType, QueryRun, RowLayout, Split, TokenRange};
use crate::{Error, Result};

/// Keys and values of one attention layer for a batch of sequences, and attention over them.
///
/// A call that fails leaves tokens and outputs unchanged. It may have reserved memory, which the next call uses. The
/// futures of the CPU backend are ready at once.
///
/// ```
/// use kvpack::cache::{KvCache, PromptSpan, Recipe};
/// use kvpack::cpu::{Cpu, CpuTensor};
/// use kvpack::plan::{ElementType, RowLayout, TokenRange};
/// use kvpack::{AttentionShape, Bits};
///
/// # futures::executor::block_on(async {
/// let shape = AttentionShape::new(8, 2, 64)?; // 8 query heads, 2 KV heads, head_dim 64
/// let mut cache = KvCache::new(Cpu::new(), shape, 1, Recipe::calibquant(Bits::Two))?;
///
/// // A prompt of 20 text tokens, 600 visual ones and 10 of text, as [tokens, kv_heads, head_dim].
/// let keys = CpuTensor::F32((0..630 * 2 * 64).map(|i| (i as f32 * 0.3).sin()).collect());
/// let values = keys.clone();
/// let prompt = [
///     PromptSpan::f16(TokenRange::new(0, 20)?),
///     PromptSpan::packed(TokenRange::new(20, 620)?),
///     PromptSpan::f16(TokenRange::new(620, 630)?),
/// ];
/// cache.prefill(0, RowLayout::token_major(630, &shape), &keys, &values, &prompt).await?;
///
/// // One decode step: the new token's key and value, then attention.
/// let token = CpuTensor::F32(vec![0.5; 2 * 64]);
/// cache.append(RowLayout::token_major(1, &shape), &token, &token).await?;
/// let query = CpuTensor::F32(vec![0.1; 8 * 64]);
/// let output = cache.attend(&query, ElementType::F32).await?;
/// assert_eq!(output.to_f32().len(), 8 * 64);
/// assert_eq!(cache.tokens(0)?, 631);
/// # Ok::<(), kvpack::Error>(())
/// # }).unwrap();
/// ```
pub struct KvCache<B: Backend> {
    pub(super) group: LayerGroup<B>,
    pub(super) budget: Budget,
}

/// The only layer of the group.
pub(super) const LAYER: usize = 0;

impl<B: Backend> KvCache<B> {
    /// An empty cache for `sequences` sequences. It allocates nothing yet.
    ///
    /// Caches share a device by sharing its backend; backends are cheap to clone.
    ///
    /// # Errors
    /// [`Error::Format`] when a format of the recipe does not fit the shape or the rule for appended tokens,
    /// [`Error::Plan`] for no sequences, [`Error::Limit`] for more than [`MOST_SEQUENCES`](super::MOST_SEQUENCES).
    pub fn new(backend: B, shape: AttentionShape, sequences: usize, recipe: Recipe) -> Result<Self> {
        let flags = Arc::new(backend.create_non_finite_flags(1)?);
        let members = Members { numbers: vec![LAYER], flags };
        Ok(Self { group: LayerGroup::new(backend, shape, recipe, sequences, members)?, budget: Budget::default() })
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.group.backend
    }

    /// Shape of the layer.
    pub fn shape(&self) -> &AttentionShape {
        &self.group.shape
    }

    /// The recipe of the cache.
    pub fn recipe(&self) -> &Recipe {
        self.group.recipe()
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.group.page_tables.sequences().len()
    }

    /// Sets how finely decode steps are cut into work items. Results differ only by rounding.
    pub fn set_split(&mut self, split: Split) {
        self.group.split = split;
    }

    /// Number of tokens that a sequence holds.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence.
    pub fn tokens(&self, sequence: usize) -> Result<usize> {
        Ok(self.group.page_tables.sequence(sequence)?.tokens())
    }

    /// Length of a sequence: all tokens that it was given, including evicted ones. This is the position of the next
    /// token.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence.
    pub fn length(&self, sequence: usize) -> Result<usize> {
        Ok(self.group.page_tables.sequence(sequence)?.length)
    }

    /// The positions of the tokens of a sequence, span by span in the order of [`KvCache::dequantize`].
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::NotSubmitted`] when a step that
    /// chose them is encoded and not submitted, [`Error::DeviceLost`].
    pub async fn positions(&self, sequence: usize) -> Result<Vec<SpanPositions>> {
        self.group.positions(LAYER, sequence).await
    }

    /// The exact number of bytes held.
    pub fn memory(&self) -> CacheMemory {
        self.group.memory()
    }

    /// Stores the keys and values of a prompt, or of a further part of one, at the end of a sequence.
    ///
    /// `spans` assign tokens to stores. Consecutive spans follow each other, and cover the tokens of `rows` if nothing
    /// is gathered. If something is gathered, tokens that no span names are evicted: they keep their positions, but are
    /// not stored. Each span has ranges of its own if the format has span ranges, so an image is best stored as one
    /// span.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::PromptSpans`], [`Error::NoTokens`], [`Error::Elements`], [`Error::NotFinite`] and
    /// [`Error::Plan`] for what was passed, [`Error::Unsupported`] when a span is gathered and the layer has a window,
    /// [`Error::NoRoom`] or [`Error::OutOfMemory`] when it does not fit. The cache is as it was.
    pub async fn prefill(
        &mut self,
        sequence: usize,
        rows: RowLayout,
        keys: &B::Tensor,
        values: &B::Tensor,
        spans: &[PromptSpan<'_, B::Indices>],
    ) -> Result<()> {
        let new = NewTokens { rows, keys, values };
        self.group.check_lengths(new)?;
        self.group.page_tables.check_longer(sequence, rows.tokens)?;
        self.group.check_rows(new).await?;
        check_spans(spans, rows.tokens)?;
        let needed = self.group.page_tables.room_for_prompt(spans)?;
        self.reserve_room(needed, Asked::OnTheWay).await?;
        let change = self.group.page_tables.prefill(sequence, rows.tokens, spans)?;
        let written = self.group.write_prompt(LAYER, &change, sequence, new, spans);
        self.group.close(change, written)
    }

    /// Appends one token to every sequence: token i of `rows` to sequence i. Keys and values are `[sequences, kv_heads,
    /// head_dim]` in the strides of `rows`.
    ///
    /// # Errors
    /// As [`KvCache::append_to`].
    pub async fn append(&mut self, rows: RowLayout, keys: &B::Tensor, values: &B::Tensor) -> Result<()> {
        let all: Vec<usize> = (0..self.sequences()).collect();
        self.append_to(&all, rows, keys, values).await
    }

    /// Appends one token to each of the given sequences: token i of `rows` to `sequences[i]`.
    ///
    /// The recipe decides whether they are stored in f16 or packed. If it packs full tiles, a token that pushes a tile
    /// out of the residual window also packs that tile within this call. Elements that are not finite are stored as
    /// zeros, and [reported later](KvCache::non_finite).
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when one is named twice or there are more or
    /// fewer tokens than sequences, [`Error::NoTokens`], [`Error::Elements`] for keys and values,
    /// [`Error::NoRoom`] or [`Error::OutOfMemory`] when they do not fit. The cache is as it was.
    pub async fn append_to(
        &mut self,
        sequences: &[usize],
        rows: RowLayout,
        keys: &B::Tensor,
        values: &B::Tensor,
    ) -> Result<()> {
        let runs: Vec<TokenRun> = sequences.iter().map(|&sequence| TokenRun::decode(sequence)).collect();
        self.append_runs(&runs, NewTokens { rows, keys, values }).await
    }

    /// Appends the tokens of `rows` to one sequence: a chunk of a prompt, or of a text under evaluation.
    ///
    /// Unlike [`KvCache::append`] it packs no tiles, so that the chunk's own queries still see them in f16: let them
    /// attend ([`KvCache::attend_causal`]), then call [`KvCache::pack_windows`]. With chunks of 128 tokens that begin
    /// at multiples of 128, every query then sees what it would see if tokens were appended one by one, but for the
    /// last of each chunk. A recipe that packs each token as it arrives does so here too. Elements that are not finite
    /// are stored as zeros, and [reported later](KvCache::non_finite).
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::NoTokens`], [`Error::Elements`] for keys and
    /// values, [`Error::NoRoom`] or [`Error::OutOfMemory`] when they do not fit. The cache is as it was.
    pub async fn extend(
        &mut self,
        sequence: usize,
        rows: RowLayout,
        keys: &B::Tensor,
        values: &B::Tensor,
    ) -> Result<()> {
        self.append_runs(&[TokenRun::chunk(sequence, rows.tokens)], NewTokens { rows, keys, values }).await
    }

    async fn append_runs(&mut self, runs: &[TokenRun], new: NewTokens<'_, B::Tensor>) -> Result<()> {
        let change = self.store_runs(runs, new).await?;
        self.group.close(change, Ok(()))
    }

    /// Stores new tokens in a change of the page tables that is still open.
    pub(super) async fn store_runs(
        &mut self,
        runs: &[TokenRun],
        new: NewTokens<'_, B::Tensor>,
    ) -> Result<Change<B::Indices>> {
        self.group.page_tables.check_runs(runs, new.rows.tokens)?;
        self.group.check_lengths(new)?;
        let needed = self.group.page_tables.room_for_append(runs, new.rows.tokens)?;
        self.reserve_room(needed, Asked::OnTheWay).await?;
        let change = self.group.open_append(runs, new.rows.tokens)?;
        match self.group.write_tokens(LAYER, &change, new) {
            Ok(()) => Ok(change),
            Err(error) => {
                self.group.page_tables.abandon(change);
                Err(error)
            }
        }
    }

    /// Keys and values of appended tokens that could not be stored as they were, over all steps since
    /// [`KvCache::clear_non_finite`]: NaN, an infinity, or more than a format of the recipe takes. Zero was stored in
    /// place of every such element. Appending does not look for them, since it would have to wait for the device;
    /// this does wait.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    pub async fn non_finite(&self) -> Result<Vec<FlaggedToken>> {
        self.group.read_flags().await
    }

    /// Clears the tokens that [`KvCache::non_finite`] returns.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    pub fn clear_non_finite(&mut self) -> Result<()> {
        self.group.clear_flags()
    }

    /// Packs every full tile of a sequence's appended tokens that is due by the recipe.
    ///
    /// [`KvCache::append`] does this by itself. After [`KvCache::extend`] the caller must do it, once the queries of
    /// the new tokens have attended.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::NoRoom`] or [`Error::OutOfMemory`] when the packed
    /// tiles do not fit. The cache is as it was.
    pub async fn pack_windows(&mut self, sequence: usize) -> Result<()> {
        let needed = self.group.page_tables.room_for_windows(sequence)?;
        self.reserve_room(needed, Asked::OnTheWay).await?;
        let change = self.group.open_windows(sequence)?;
        let written = self.group.write_windows(&change);
        self.group.close(change, written)
    }

    /// Sets the centre of an empty sequence: `[kv_heads, head_dim]`, such as the bias of the model's key projection
    /// where keys are not rotated by position, or a mean over a calibration set. Otherwise a sequence of a [centred
    /// recipe](Recipe::with_centre) takes the mean of its first tokens.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when the recipe has no centres or the
    /// sequence is not empty, [`Error::Elements`] and [`Error::NotFinite`] for the centre, [`Error::NoRoom`] or
    /// [`Error::OutOfMemory`]. The cache is as it was.
    pub async fn set_centre(&mut self, sequence: usize, centre: &B::Tensor) -> Result<()> {
        let rows = RowLayout::token_major(1, self.shape());
        self.group.check_centre(centre).await?;
        self.reserve_room(Vec::new(), Asked::OnTheWay).await?;
        let change = self.group.page_tables.set_centre(sequence)?;
        let written = self.group.write_centres(LAYER, &change, rows, centre);
        self.group.close(change, written)
    }

    /// Removes all tokens of a sequence and releases its pages, range slots and centre.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence.
    pub fn clear(&mut self, sequence: usize) -> Result<()> {
        self.group.page_tables.clear(sequence)
    }

    /// Lets an empty sequence share all tokens of another: for beams, parallel samples, or a shared system prompt.
    ///
    /// Nothing is copied. Pages are shared and count once in [`KvCache::memory`]. The first of the sequences that
    /// appends to a shared open page gets a copy of it.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when `target` holds tokens.
    pub fn fork(&mut self, source: usize, target: usize) -> Result<()> {
        self.group.page_tables.fork(source, target)
    }

    /// Removes the newest tokens of a sequence and keeps those at the first `length` positions: for speculative tokens
    /// that were rejected.
    ///
    /// Packed tokens stay packed, and the sequence keeps its centre, even if it keeps no token.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when it is shorter, or when the cut goes
    /// through a gathered span.
    pub fn truncate(&mut self, sequence: usize, length: usize) -> Result<()> {
        self.group.page_tables.truncate(sequence, length)
    }

    /// Removes tokens of a sequence in whole pages, and releases the pages: for example tokens that a sliding window no
    /// longer sees.
    ///
    /// In every span that begins within `positions`, the pages that lie entirely within `positions` are removed,
    /// starting at the span's beginning. Tokens of a page that reaches further stay, and so do gathered tokens. Queries
    /// see the remaining tokens.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence.
    pub fn forget(&mut self, sequence: usize, positions: TokenRange) -> Result<()> {
        self.group.page_tables.forget(sequence, positions)
    }

    /// Attends to all tokens of all sequences, with one query per sequence.
    ///
    /// `queries` are `[sequences, query_heads, head_dim]` and so is the output. Scores are `q·k/√head_dim`; those of
    /// packed spans are calibrated if the recipe says so. The output of a sequence without tokens is 0. A query head
    /// that holds a NaN or an infinity, or numbers so large that a score is +∞, has NaN in all its outputs; other heads
    /// and sequences are as they would be without it.
    ///
    /// # Errors
    /// [`Error::Elements`] when the queries have another shape, [`Error::OutOfMemory`] or [`Error::DeviceLost`] from
    /// the device.
    pub async fn attend(&self, queries: &B::Tensor, output: ElementType) -> Result<B::Tensor> {
        let all: Vec<usize> = (0..self.sequences()).collect();
        self.attend_to(&all, queries, output).await
    }

    /// Attends with one query for each of the given sequences, a subset of the batch in any order. Queries and output
    /// are `[sequences, query_heads, head_dim]`.
    ///
    /// # Errors
    /// As [`KvCache::attend`]; [`Error::Sequence`] when there is no such sequence.
    pub async fn attend_to(&self, sequences: &[usize], queries: &B::Tensor, output: ElementType) -> Result<B::Tensor> {
        let runs: Vec<QueryRun> = sequences.iter().map(|&sequence| QueryRun::decode(sequence)).collect();
        self.attend_runs(&runs, queries, output).await
    }

    /// Attends with query runs, which are contiguous in `queries`. Queries and output are `[queries, query_heads,
    /// head_dim]`, with the queries of all runs. Decoding sequences may be mixed with chunks of prompts. Each query of
    /// a causal run sees the tokens up to its own.
    ///
    /// # Errors
    /// As [`KvCache::plan`] and [`KvCache::attend`].
    pub async fn attend_runs(&self, runs: &[QueryRun], queries: &B::Tensor, output: ElementType) -> Result<B::Tensor> {
        let plan = self.plan(runs)?;
        plan.check_elements("queries", self.backend().elements(queries))?;
        self.backend().attend(&plan, &self.stores(), queries, self.group.attend_options(output)).await
    }

    /// [`KvCache::attend_runs`] into the caller's tensor, which has the layout of the queries. Its element type is
    /// used.
    ///
    /// # Errors
    /// As [`KvCache::attend_runs`]; [`Error::Elements`] when the output has another length than the queries.
    pub async fn attend_into(&self, runs: &[QueryRun], queries: &B::Tensor, output: &mut B::Tensor) -> Result<()> {
        self.group.attend_into(LAYER, &self.plan(runs)?, queries, output).await
    }

    /// Attends with the queries of the newest tokens of one sequence. Each sees the tokens up to its own.
    ///
    /// `queries` are `[queries, query_heads, head_dim]`, and so is the output. The last query is that of the last
    /// token.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when it holds fewer tokens than there are
    /// queries, [`Error::Elements`] when the queries have another shape, [`Error::OutOfMemory`] or
    /// [`Error::DeviceLost`] from the device.
    pub async fn attend_causal(&self, sequence: usize, queries: &B::Tensor, output: ElementType) -> Result<B::Tensor> {
        let per_query = self.shape().query_heads() * self.shape().head_dim();
        let queries_given = self.backend().elements(queries).div_ceil(per_query);
        self.tokens(sequence)?;
        if queries_given == 0 {
            let (given, expected, shape) = (0, per_query, "at least one query".to_owned());
            return Err(Error::Elements { what: "queries", given, expected, shape });
        }
        self.attend_runs(&[QueryRun::causal(sequence, queries_given)], queries, output).await
    }

    /// Attends with query runs and returns the states, to be merged with attention over other tokens: f32 outputs
    /// `[queries, query_heads, head_dim]`, and the log-sum-exps `[queries, query_heads]` of the scores of the original
    /// keys, centred or not.
    ///
    /// # Errors
    /// As [`KvCache::attend_runs`].
    pub async fn attend_states(&self, runs: &[QueryRun], queries: &B::Tensor) -> Result<AttentionStates<B::Tensor>> {
        let plan = self.plan(runs)?;
        plan.check_elements("queries", self.backend().elements(queries))?;
        self.group.attend_states(LAYER, &plan, queries).await
    }

    /// The stores of [`KvCache::plan`], in the order of the recipe. For engines that encode steps themselves.
    pub fn stores(&self) -> Vec<&B::Store> {
        self.group.stores(LAYER)
    }

    /// The plan of query runs over the sequences. Its stores are [`KvCache::stores`].
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence; those of [`AttendPlan::new`].
    pub fn plan(&self, runs: &[QueryRun]) -> Result<AttendPlan> {
        self.group.plan(runs)
    }

    /// The contents of a sequence, span by span in storage order, as dense f32 rows on the device.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::OutOfMemory`] when the rows do not fit.
    pub fn dequantize(&self, sequence: usize) -> Result<Vec<StoredSpan<B::Tensor>>> {
        self.group.dequantize(LAYER, sequence)
    }
}

impl<B: Backend> fmt::Debug for KvCache<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvCache")
            .field("backend", &self.backend().name())
            .field("shape", self.shape())
            .field("recipe", self.recipe())
            .field("sequences", &self.sequences())
            .finish_non_exhaustive()
    }
}
