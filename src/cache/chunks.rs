//! A context in chunks of several precisions. Chunks of equal precision are made contiguous while they are packed.

use super::{PromptSpan, StoreId};
use crate::Error;
use crate::Result;
use crate::backend::Device;
use crate::counts::{collected, saturated};
use crate::plan::{IndexShape, TokenRange};
use crate::policy::ChunkSearch;

/// How the chunks of a context lie in their stores. Attention does not depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChunkOrder {
    /// The chunks of a store are one span, and fill pages together.
    #[default]
    ByStore,
    /// The order of the context. Neighbouring chunks of one store are a span, which has pages of its own: a chunk among
    /// chunks of other stores takes the memory of a whole page. This is what reordering is compared with.
    OfContext,
}

/// The store of each chunk of a context (Cocktail, arXiv 2503.23294). Tokens before the context, after its last whole
/// chunk, and after the context stay in f16.
///
/// Chunks of one store become one span, if no other [`ChunkOrder`] is set: the packing kernel gathers them, so that
/// reordering needs no separate pass. Attention does not depend on the order of tokens, and ignores chunks.
///
/// ```
/// use kvpack::cache::{ChunkStores, KvCache, ModelRecipe, StoreId};
/// use kvpack::cpu::{Cpu, CpuTensor};
/// use kvpack::plan::{RowLayout, TokenRange};
/// use kvpack::AttentionShape;
///
/// # futures::executor::block_on(async {
/// let shape = AttentionShape::new(4, 2, 64)?;
/// let recipe: ModelRecipe = "cocktail".parse()?; // f16, 4 bits and 2 bits
/// let mut cache = KvCache::new(Cpu::new(), shape, 1, recipe.layer(0, &shape))?;
///
/// // A context of 100 tokens, three whole chunks of 32, and a question of 10.
/// let similarities = [0.9, 0.1, 0.7]; // of the chunks' embeddings with the question's
/// let stores = recipe.mixture().map_or(Ok(Vec::new()), |mixture| mixture.stores_of(&similarities))?;
/// assert_eq!(stores, [StoreId(0), StoreId(2), StoreId(1)]);
/// let chunks = ChunkStores::new(TokenRange::new(0, 100)?, 32, stores)?;
/// let spans = chunks.upload(cache.backend(), shape.kv_heads(), 110).await?;
///
/// let keys = CpuTensor::F32((0..110 * 2 * 64).map(|i| (i as f32 * 0.3).sin()).collect());
/// cache.prefill(0, RowLayout::token_major(110, &shape), &keys, &keys, &spans.prompt()).await?;
/// let tokens: Vec<usize> = cache.memory().stores().iter().map(|store| store.tokens).collect();
/// assert_eq!(tokens, [32 + 14, 32, 32]);
/// # Ok::<(), kvpack::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkStores {
    context: TokenRange,
    chunk_tokens: usize,
    stores: Vec<StoreId>,
    order: ChunkOrder,
}

/// The spans of a prompt in chunks, with their token numbers on a device.
#[derive(Clone, Debug)]
pub struct ChunkSpans<I> {
    before: Option<TokenRange>,
    gathered: Vec<(StoreId, I)>,
    runs: Vec<(StoreId, TokenRange)>,
    after: Option<TokenRange>,
}

impl ChunkStores {
    /// Assigns a store to every whole chunk of `chunk_tokens` tokens of a context.
    ///
    /// # Errors
    /// [`Error::Chunks`] when chunks of this size are not supported ([`CHUNK_TOKENS`](crate::policy::CHUNK_TOKENS)), or
    /// there is not one store per whole chunk.
    pub fn new(context: TokenRange, chunk_tokens: usize, stores: Vec<StoreId>) -> Result<Self> {
        let chunks = ChunkSearch::chunks(context.len(), chunk_tokens)?;
        if stores.len() != chunks {
            let (tokens, given) = (context.len(), stores.len());
            let reason = format!(
                "{given} stores were given; a context of {tokens} tokens has {chunks} chunks of {chunk_tokens}"
            );
            return Err(Error::Chunks { reason });
        }
        Ok(Self { context, chunk_tokens, stores, order: ChunkOrder::default() })
    }

    /// The same chunks in another order.
    #[must_use]
    pub fn with_order(self, order: ChunkOrder) -> Self {
        Self { order, ..self }
    }

    /// The store of every chunk.
    pub fn stores(&self) -> &[StoreId] {
        &self.stores
    }

    /// The spans of a prompt of `tokens` tokens that begins with the tokens before the context. By store, spans of the
    /// last store come first, as Cocktail puts the coarsest first. Uploads the token numbers that they gather.
    ///
    /// # Errors
    /// [`Error::PromptSpans`] when the context ends beyond the prompt; [`Error::NoTokens`] for 0 KV heads;
    /// [`Error::Limit`] for more KV heads than a layer may have; [`Error::OutOfMemory`] or [`Error::Limit`] from the
    /// device.
    pub async fn upload<D: Device>(
        &self,
        device: &D,
        kv_heads: usize,
        tokens: usize,
    ) -> Result<ChunkSpans<D::Indices>> {
        let (start, end) = (self.context.start(), self.context.end());
        if end > tokens {
            let reason = format!("its context in chunks is {start}..{end}");
            return Err(Error::PromptSpans { tokens, reason });
        }
        let chunked = start + self.stores.len() * self.chunk_tokens;
        // Gathered spans end with the chunks, so that a sequence can be truncated behind them.
        let Ok(below) = u32::try_from(chunked) else {
            return Err(Error::Limit {
                what: "the tokens of chunks".into(),
                needed: chunked as u64,
                allowed: u64::from(u32::MAX),
                hint: "cut the prompt",
            });
        };
        let (mut stores, mut runs) = (Vec::new(), Vec::new());
        match self.order {
            ChunkOrder::ByStore => stores.extend_from_slice(&self.stores),
            ChunkOrder::OfContext => runs = self.runs()?,
        }
        stores.sort_unstable();
        stores.dedup();
        let mut gathered = Vec::with_capacity(stores.len());
        for store in stores.into_iter().rev() {
            let of_head = self.tokens_of(store);
            let indices = IndexShape::new(kv_heads, of_head.len(), below)?.indices();
            let of_heads = collected("token numbers of chunks", of_head.iter().copied().cycle().take(indices))?;
            gathered.push((store, device.upload_indices(&of_heads, kv_heads, below).await?));
        }
        let before = TokenRange::new(0, start).ok();
        let after = TokenRange::new(chunked, tokens).ok();
        Ok(ChunkSpans { before, gathered, runs, after })
    }

    /// The tokens of neighbouring chunks of one store, in the order of the context.
    fn runs(&self) -> Result<Vec<(StoreId, TokenRange)>> {
        let mut start = self.context.start();
        let of = |alike: &[StoreId]| {
            let (from, end) = (start, start + alike.len() * self.chunk_tokens);
            start = end;
            Ok((alike[0], TokenRange::new(from, end)?))
        };
        self.stores.chunk_by(PartialEq::eq).map(of).collect()
    }

    /// Tokens of the chunks in a store, ascending.
    fn tokens_of(&self, store: StoreId) -> Vec<u32> {
        let chunks = self.stores.iter().enumerate().filter(|(_, of_chunk)| **of_chunk == store);
        let start = |chunk: usize| self.context.start() + chunk * self.chunk_tokens;
        let tokens = chunks.flat_map(|(chunk, _)| start(chunk)..start(chunk + 1));
        // They lie below the end of the chunks, which 32 bits can count.
        tokens.map(saturated).collect()
    }
}

impl<I> ChunkSpans<I> {
    /// The spans for [`KvCache::prefill`](super::KvCache::prefill) and
    /// [`ModelCache::begin_prefill`](super::ModelCache::begin_prefill).
    pub fn prompt(&self) -> Vec<PromptSpan<'_, I>> {
        let before = self.before.map(PromptSpan::f16);
        let gathered = self.gathered.iter().map(|(store, tokens)| PromptSpan::gather(tokens, *store));
        let runs = self.runs.iter().map(|(store, tokens)| PromptSpan::run(*tokens, *store));
        before.into_iter().chain(gathered).chain(runs).chain(self.after.map(PromptSpan::f16)).collect()
    }
}
