//! Contexts that stand for prompts: the same random keys and values for every sequence of a cache.

use kvpack::AttentionShape;
use kvpack::backend::Backend;
use kvpack::cache::{Budget, ChunkStores, Growth, ModelCache, PromptSpan, Recipe, StoreRoom, TokenRun};
use kvpack::plan::{RowLayout, TokenRange};
use pollster::block_on;

/// Contexts of a number of sequences.
#[derive(Clone, Copy, Debug)]
pub struct Contexts {
    /// Sequences.
    pub sequences: usize,
    /// Tokens of each.
    pub tokens: usize,
    /// Tokens that will be decoded behind them.
    pub more: usize,
}

impl Contexts {
    /// A cache of these layers, which have one shape, that holds the given keys and values in every layer and sequence.
    /// `chunks` says how a context is stored in parts.
    ///
    /// # Errors
    /// What the cache and its device report.
    pub fn cache<B: Backend + Clone>(
        &self,
        backend: &B,
        (layers, shape): (&[(AttentionShape, Recipe)], &AttentionShape),
        [keys, values]: [&B::Tensor; 2],
        chunks: Option<&ChunkStores>,
    ) -> kvpack::Result<ModelCache<B>> {
        let exact = Budget::unlimited().growing(Growth::Exact);
        let mut cache = ModelCache::new(backend, layers, self.sequences)?.with_budget(exact);
        let uploaded = chunks.map(|chunks| block_on(chunks.upload(backend, shape.kv_heads(), self.tokens)));
        let uploaded = uploaded.transpose()?;
        let spans = match &uploaded {
            Some(chunks) => chunks.prompt(),
            None => vec![PromptSpan::packed(TokenRange::new(0, self.tokens)?)],
        };
        self.store(&mut cache, (RowLayout::token_major(self.tokens, shape), keys, values), &spans)?;
        Ok(cache)
    }

    /// Stores keys and values, which have `rows` and are those of all layers, for every sequence of an empty cache. Then
    /// reserves what decoding needs. `spans` say how a context is stored.
    ///
    /// # Errors
    /// What the cache and its device report.
    fn store<B: Backend>(
        &self,
        cache: &mut ModelCache<B>,
        (rows, keys, values): (RowLayout, &B::Tensor, &B::Tensor),
        spans: &[PromptSpan<'_, B::Indices>],
    ) -> kvpack::Result<()> {
        let all =
            |room: &StoreRoom| StoreRoom { pages: room.pages * self.sequences, spans: room.spans * self.sequences };
        let rooms: Vec<StoreRoom> = cache.room_for_prefill(0, spans)?.iter().map(all).collect();
        block_on(cache.reserve(&rooms))?;
        for sequence in 0..self.sequences {
            block_on(cache.reserve_for_prefill(spans))?;
            cache.begin_prefill(sequence, self.tokens, spans)?;
            for layer in 0..cache.layers() {
                block_on(cache.store_prompt(layer, rows, keys, values, spans))?;
            }
            cache.commit()?;
        }
        let later: Vec<TokenRun> = (0..self.sequences).map(|sequence| TokenRun::chunk(sequence, self.more)).collect();
        block_on(cache.reserve_for_append(&later))
    }
}

/// Similarities of chunks with a question, of which few are large.
pub fn similarities(chunks: usize) -> Vec<f32> {
    let at = |chunk: usize| (chunk as u32).wrapping_mul(2_654_435_761) >> 8;
    (0..chunks).map(|chunk| (at(chunk) as f32 / (1 << 24) as f32).powi(2)).collect()
}
