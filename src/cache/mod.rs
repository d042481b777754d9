//! [`KvCache`]: the comfortable way in.
//!
//! A cache holds the keys and values of one attention layer for a batch of sequences. It keeps the books (spans, pages,
//! range slots) and leaves storing and computing to a [`Backend`]. An engine has one per layer.

mod append;
mod extend;
mod fork;
mod pool;
mod prefill;
mod recipe;
mod recipe_text;
mod sequence;
mod windows;

use std::fmt;

use pool::Pool;
pub use pool::{CacheMemory, StoreMemory};
pub use recipe::{PromptSpan, RecentWindow, Recipe, SpanStorage};
pub use recipe_text::{METHODS, Method, ModelRecipe};
use sequence::Sequence;

use crate::backend::{AttendOptions, Backend, SpanRead};
use crate::format::{AttentionShape, Calibration, KeyOrValue, SegmentFormat};
use crate::plan::{AttendPlan, ElementType, QueryRun, RowLayout, SpanView, Split, StoreView};
use crate::{Error, Result};

/// Keys and values of one attention layer for a batch of sequences, and attention over them.
///
/// A call that fails leaves tokens and outputs as they were. Memory may have been reserved by then; the next call uses
/// it. The futures of the CPU backend are ready at once.
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
    backend: B,
    shape: AttentionShape,
    recipe: Recipe,
    split: Split,
    f16: Pool<B>,
    packed: Pool<B>,
    sequences: Vec<Sequence>,
}

/// Most sequences of one cache.
pub const MOST_SEQUENCES: usize = 1 << 20;

/// A span of a sequence as dense f32 rows `[kv_heads, tokens, head_dim]`.
#[derive(Clone, Debug)]
pub struct StoredSpan<T> {
    /// Its tokens.
    pub tokens: usize,
    /// Its format.
    pub format: SegmentFormat,
    /// Calibration of its scores.
    pub calibration: Option<Calibration>,
    /// What the stored keys decode to.
    pub keys: T,
    /// What the stored values decode to.
    pub values: T,
}

impl<B: Backend> KvCache<B> {
    /// An empty cache for `sequences` sequences. It allocates nothing yet.
    ///
    /// Caches share a device by sharing its backend; backends are cheap to clone.
    ///
    /// # Errors
    /// [`Error::Format`] when the recipe's format does not fit the shape or what happens to recent tokens, [`Error::Plan`] for no sequences,
    /// [`Error::Limit`] for more than [`MOST_SEQUENCES`].
    pub fn new(backend: B, shape: AttentionShape, sequences: usize, recipe: Recipe) -> Result<Self> {
        if sequences == 0 {
            return Err(Error::Plan { what: "cache", reason: "it needs room for at least one sequence".into() });
        }
        if sequences > MOST_SEQUENCES {
            return Err(Error::Limit {
                what: "the sequences of a cache".into(),
                needed: sequences as u64,
                allowed: MOST_SEQUENCES as u64,
                hint: "spread them over several caches",
            });
        }
        if recipe.recent == RecentWindow::PackTokens && !recipe.packed.takes_single_tokens() {
            let reason = recipe.packed.why_no_single_tokens();
            return Err(Error::Format { format: recipe.packed.to_string(), reason });
        }
        let f16 = Pool::new(&backend, shape, SegmentFormat::F16)?;
        let packed = Pool::new(&backend, shape, recipe.packed)?;
        let sequences = vec![Sequence::default(); sequences];
        Ok(Self { backend, shape, recipe, split: Split::default(), f16, packed, sequences })
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Shape of the layer.
    pub fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// How the cache stores.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Changes how finely decode steps are cut into work items; results differ only by rounding.
    pub fn set_split(&mut self, split: Split) {
        self.split = split;
    }

    /// Tokens that a sequence holds.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence.
    pub fn tokens(&self, sequence: usize) -> Result<usize> {
        Ok(self.sequence(sequence)?.tokens())
    }

    /// Bytes held, exactly.
    pub fn memory(&self) -> CacheMemory {
        let tokens = |storage| self.sequences.iter().map(|sequence| sequence.tokens_in(storage)).sum();
        CacheMemory {
            f16: self.f16.memory(&self.backend, tokens(SpanStorage::F16)),
            packed: self.packed.memory(&self.backend, tokens(SpanStorage::Packed)),
        }
    }

    /// Makes room for one more span of so many tokens, so that storing them allocates nothing on the device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] or [`Error::Limit`].
    pub async fn reserve(&mut self, storage: SpanStorage, tokens: usize) -> Result<()> {
        let pages = tokens.div_ceil(crate::TILE_TOKENS);
        let storage = self.storage(storage);
        pool_of(&mut self.f16, &mut self.packed, storage).reserve(&self.backend, pages, 1).await
    }

    /// Forgets all tokens of a sequence; its pages and range slots are free again.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence.
    pub fn clear(&mut self, sequence: usize) -> Result<()> {
        self.sequence(sequence)?;
        for span in self.sequences[sequence].spans.drain(..) {
            pool_of(&mut self.f16, &mut self.packed, span.storage).release(&span.lease);
        }
        Ok(())
    }

    /// Attends with one query per sequence to all tokens of the sequences.
    ///
    /// `queries` are `[sequences, query_heads, head_dim]` and so is the output. Scores are `q·k/√head_dim`; those of
    /// packed spans are calibrated if the recipe says so. A query head that holds a NaN or an infinity, or numbers so large
    /// that a score is infinite, has NaN in all its outputs; other heads and sequences are as they would be without it.
    ///
    /// # Errors
    /// [`Error::Elements`] when the queries have another shape, [`Error::Plan`] when a sequence holds no tokens (see
    /// [`KvCache::attend_to`]), [`Error::OutOfMemory`] or [`Error::DeviceLost`] from the device.
    pub async fn attend(&self, queries: &B::Tensor, output: ElementType) -> Result<B::Tensor> {
        let all: Vec<usize> = (0..self.sequences.len()).collect();
        self.attend_to(&all, queries, output).await
    }

    /// Attends with one query for each of the given sequences, which may be some of the batch in any order.
    ///
    /// # Errors
    /// Those of [`KvCache::attend`], and [`Error::Sequence`] when there is no such sequence.
    pub async fn attend_to(&self, sequences: &[usize], queries: &B::Tensor, output: ElementType) -> Result<B::Tensor> {
        let plan = self.plan(sequences)?;
        let (given, expected) = (self.backend.elements(queries), self.query_elements(sequences.len()));
        if given != expected {
            let (heads, head_dim) = (self.shape.query_heads(), self.shape.head_dim());
            let shape = format!("{} sequences × {heads} query heads × {head_dim} channels", sequences.len());
            return Err(Error::Elements { what: "queries", given, expected, shape });
        }
        let options = self.attend_options(output);
        self.backend.attend(&plan, &self.stores(), queries, options).await
    }

    /// The stores of [`KvCache::plan`]: the f16 store, then the packed one. For engines that encode steps themselves.
    pub fn stores(&self) -> [&B::Store; 2] {
        [&self.f16.store, &self.packed.store]
    }

    /// The plan of a decode step of the given sequences; its stores are [`KvCache::stores`].
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when one holds no tokens.
    pub fn plan(&self, sequences: &[usize]) -> Result<AttendPlan> {
        let runs: Vec<QueryRun> = sequences.iter().map(|&sequence| QueryRun::decode(sequence)).collect();
        self.plan_runs(&runs)
    }

    /// The plan of runs of queries over the cache's sequences.
    fn plan_runs(&self, runs: &[QueryRun]) -> Result<AttendPlan> {
        let mut views = [
            StoreView { format: SegmentFormat::F16, calibration: None, spans: Vec::new() },
            StoreView { format: self.recipe.packed, calibration: self.recipe.calibration, spans: Vec::new() },
        ];
        let mut sequences: Vec<usize> = runs.iter().map(|run| run.sequence).collect();
        sequences.sort_unstable();
        sequences.dedup();
        for sequence in sequences {
            let mut start = 0;
            for span in &self.sequence(sequence)?.spans {
                let (pages, range_slot) = (&span.lease.pages, span.lease.range_slot());
                let view = &mut views[usize::from(span.storage == SpanStorage::Packed)];
                view.spans.push(SpanView { sequence, start, tokens: span.tokens, pages, range_slot });
                start += span.tokens;
            }
        }
        AttendPlan::new(self.shape, runs, &views)
    }

    fn attend_options(&self, output: ElementType) -> AttendOptions {
        AttendOptions { query: self.recipe.query, output, split: self.split }
    }

    /// What a sequence holds, span by span in token order, as dense f32 rows on the device.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::OutOfMemory`] when the rows do not fit.
    pub fn dequantize(&self, sequence: usize) -> Result<Vec<StoredSpan<B::Tensor>>> {
        let mut stored = Vec::new();
        for span in &self.sequence(sequence)?.spans {
            let (pool, calibration) = match span.storage {
                SpanStorage::F16 => (&self.f16, None),
                SpanStorage::Packed => (&self.packed, self.recipe.calibration),
            };
            let lease = &span.lease;
            let read = SpanRead { pages: &lease.pages, tokens: span.tokens, range_slot: lease.range_slot() };
            let (keys, values) = self.backend.dequantize(&pool.store, read)?;
            stored.push(StoredSpan { tokens: span.tokens, format: pool.format, calibration, keys, values });
        }
        Ok(stored)
    }

    fn sequence(&self, index: usize) -> Result<&Sequence> {
        let sequences = self.sequences.len();
        self.sequences.get(index).ok_or(Error::Sequence { given: index, sequences })
    }

    fn query_elements(&self, sequences: usize) -> usize {
        sequences * self.shape.query_heads() * self.shape.head_dim()
    }

    /// Where spans that ask for `storage` really go.
    fn storage(&self, storage: SpanStorage) -> SpanStorage {
        if self.recipe.packs() { storage } else { SpanStorage::F16 }
    }

    /// Checks keys and values before anything changes: their lengths, then their elements.
    async fn check_rows(&self, rows: &RowLayout, keys: &B::Tensor, values: &B::Tensor) -> Result<()> {
        rows.check("keys", self.backend.elements(keys), &self.shape)?;
        rows.check("values", self.backend.elements(values), &self.shape)?;
        for (which, tensor) in [(KeyOrValue::Key, keys), (KeyOrValue::Value, values)] {
            // Whatever is stored in f16 now may be packed later.
            let largest = self.recipe.packed.tensor(which).largest_element(self.shape.head_dim());
            if let Some(found) = self.backend.first_non_finite(which, tensor, rows, &self.shape, largest).await? {
                return Err(Error::NotFinite {
                    tensor: which,
                    token: found.token,
                    kv_head: found.kv_head,
                    channel: found.channel,
                    value: found.value.to_string(),
                    largest,
                });
            }
        }
        Ok(())
    }
}

impl<B: Backend> fmt::Debug for KvCache<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvCache")
            .field("backend", &self.backend.name())
            .field("shape", &self.shape)
            .field("recipe", &self.recipe)
            .field("sequences", &self.sequences.len())
            .finish_non_exhaustive()
    }
}

/// The pool of a storage, borrowed apart from the rest of the cache.
fn pool_of<'a, B: Backend>(f16: &'a mut Pool<B>, packed: &'a mut Pool<B>, storage: SpanStorage) -> &'a mut Pool<B> {
    match storage {
        SpanStorage::F16 => f16,
        SpanStorage::Packed => packed,
    }
}
