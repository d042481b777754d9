//! kvpack's attention: a [`ModelCache`].

use std::time::{Duration, Instant};

use anyhow::Result;
use candle_core::{Device, Tensor};
use kvpack::Backend;
use kvpack::backend::{QueriesAndKeys, TensorRows};
use kvpack::cache::{
    CacheMemory, ChunkStores, DenseLayer, MeasuredQueries, ModelCache, ModelRecipe, ObservedPrompt, PromptSpan,
    TokenRun,
};
use kvpack::plan::{ElementType, RowLayout, TokenRange};
use kvpack::policy::{
    ColumnRequest, HeadAggregation, Policy, QueryPositions, RowStatsSource, Selection, Spans, StatsRequest,
};
use pollster::block_on;

use super::dense_prompt::{of_queries, upload};
use super::recompress::Recompression;
use super::{Attention, Chunk, Config, DensePrompt};

/// The only sequence of the cache.
const SEQUENCE: usize = 0;

/// The cache of all layers, stored by a recipe.
///
/// A chunk of tokens is a step of the cache: the first layer opens it, the last one commits it.
pub struct PackedAttention<B: Backend> {
    cache: ModelCache<B>,
    again: Option<Recompression>,
    time: Duration,
}

impl<B: Backend + Clone> PackedAttention<B> {
    /// An empty cache. Where the recipe says so, it is compressed again as the text grows.
    ///
    /// # Errors
    /// When the recipe does not fit the model.
    pub fn new(backend: &B, config: &Config, recipe: &ModelRecipe) -> Result<Self> {
        let layers = config.cache_layers(recipe)?;
        let again = recipe.every().zip(recipe.policy());
        let again = again.map(|(every, policy)| Recompression::new(every, policy.clone(), config.layers));
        Ok(Self { cache: ModelCache::new(backend, &layers, 1)?, again, time: Duration::ZERO })
    }
}

impl<B: Backend + Clone> PackedAttention<B> {
    /// Hands a prompt that was read to a policy; `spans` say which of its tokens are images. What it holds may be
    /// compressed into any cache of the model.
    ///
    /// # Errors
    /// What the policy, the device or the cache says.
    pub fn observe(&self, prompt: &DensePrompt, policy: Policy, spans: Spans) -> Result<ObservedPrompt<B>> {
        let mut observed = self.cache.observe(policy, spans)?;
        (0..self.cache.layers()).try_for_each(|layer| block_on(self.observe_layer(&mut observed, prompt, layer)))?;
        Ok(observed)
    }

    async fn observe_layer(&self, observed: &mut ObservedPrompt<B>, prompt: &DensePrompt, layer: usize) -> Result<()> {
        let (backend, shape) = (self.cache.backend(), self.cache.shape(layer)?);
        let dense = self.dense(prompt, layer).await?;
        let Some(measured) = observed.query_rows() else {
            return Ok(observed.observe(layer, dense, None)?);
        };
        let layout = RowLayout::token_major(measured.len(), &of_queries(shape)?);
        let tensor = upload(backend, &prompt.queries(layer, measured)?).await?;
        let queries = MeasuredQueries { queries: TensorRows { tensor: &tensor, layout }, known_lse: None };
        Ok(observed.observe(layer, dense, Some(queries))?)
    }

    /// What the keys of a prompt receive from these query rows in every layer, `[kv_heads, tokens]`: the mean over the
    /// query heads of a KV head.
    ///
    /// # Errors
    /// Those of the device.
    pub fn column_sums(&self, prompt: &DensePrompt, rows: &QueryPositions) -> Result<Vec<Vec<f32>>> {
        (0..self.cache.layers()).map(|layer| block_on(self.column_sums_of(layer, prompt, rows))).collect()
    }

    async fn column_sums_of(&self, layer: usize, prompt: &DensePrompt, rows: &QueryPositions) -> Result<Vec<f32>> {
        let (backend, shape) = (self.cache.backend(), *self.cache.shape(layer)?);
        let dense = self.dense(prompt, layer).await?;
        let queries = upload(backend, &prompt.queries(layer, rows)?).await?;
        let layout = RowLayout::token_major(rows.len(), &of_queries(&shape)?);
        let queries = TensorRows { tensor: &queries, layout };
        let keys = TensorRows { tensor: &dense.keys, layout: dense.rows };
        let columns = ColumnRequest { aggregation: HeadAggregation::Mean, threshold: None };
        let request = StatsRequest { columns, rows: RowStatsSource::Measured };
        let scale = self.cache.recipe(layer)?.attention().scale(&shape);
        let input = QueriesAndKeys { shape, scale, rows, queries, keys };
        let measured = backend.measure_attention(input, request, None)?;
        Ok(backend.download(&measured.column_sums).await?)
    }

    /// Stores what the policy keeps of an observed prompt.
    ///
    /// # Errors
    /// What the policy, the device or the cache says.
    pub fn compress(&mut self, observed: &ObservedPrompt<B>) -> Result<Selection> {
        let start = Instant::now();
        let selection = block_on(self.cache.compress(SEQUENCE, observed))?;
        self.time += start.elapsed();
        Ok(selection)
    }

    /// Stores a prompt that was read: the recipe's sink in f16, all else packed as one span. The residual window takes
    /// none of it, only tokens that are appended later.
    ///
    /// # Errors
    /// Those of the device or the cache.
    pub fn store(&mut self, prompt: &DensePrompt) -> Result<()> {
        let (tokens, sink) = (prompt.tokens(), self.cache.recipe(0)?.sink());
        let mut spans = Vec::with_capacity(2);
        if sink.min(tokens) > 0 {
            spans.push(PromptSpan::f16(TokenRange::new(0, sink.min(tokens))?));
        }
        if sink < tokens {
            spans.push(PromptSpan::packed(TokenRange::new(sink, tokens)?));
        }
        block_on(self.store_spans(prompt, &spans))
    }

    /// Stores a prompt that was read, its context in chunks.
    ///
    /// # Errors
    /// Those of the device or the cache.
    pub fn store_chunks(&mut self, prompt: &DensePrompt, chunks: &ChunkStores) -> Result<()> {
        let kv_heads = self.cache.shape(0)?.kv_heads();
        let spans = block_on(chunks.upload(self.cache.backend(), kv_heads, prompt.tokens()))?;
        block_on(self.store_spans(prompt, &spans.prompt()))
    }

    async fn store_spans(&mut self, prompt: &DensePrompt, spans: &[PromptSpan<'_, B::Indices>]) -> Result<()> {
        let start = Instant::now();
        self.cache.reserve_for_prefill(spans).await?;
        self.cache.begin_prefill(SEQUENCE, prompt.tokens(), spans)?;
        for layer in 0..self.cache.layers() {
            let DenseLayer { rows, keys, values } = self.dense(prompt, layer).await?;
            self.cache.store_prompt(layer, rows, &keys, &values, spans).await?;
        }
        self.cache.commit()?;
        self.time += start.elapsed();
        Ok(())
    }

    /// Keys and values of a layer of a prompt, on the device.
    async fn dense(&self, prompt: &DensePrompt, layer: usize) -> Result<DenseLayer<B::Tensor>> {
        let (backend, shape) = (self.cache.backend(), self.cache.shape(layer)?);
        let (keys, values) = prompt.keys_and_values(layer)?;
        let rows = RowLayout::head_major(prompt.tokens(), shape);
        Ok(DenseLayer { rows, keys: upload(backend, keys).await?, values: upload(backend, values).await? })
    }
}

impl<B: Backend> PackedAttention<B> {
    /// Time spent storing and attending so far, transfers included.
    pub fn time(&self) -> Duration {
        self.time
    }

    /// Bytes of each layer.
    pub fn memory(&self) -> impl Iterator<Item = CacheMemory> {
        (0..self.cache.layers()).filter_map(|layer| self.cache.memory_of(layer).ok())
    }

    /// How often the text was compressed again, where the recipe has that.
    pub fn compressed_again(&self) -> Option<usize> {
        self.again.as_ref().map(Recompression::times)
    }
}

impl<B: Backend + Clone> PackedAttention<B> {
    async fn store_and_attend(&mut self, chunk: &Chunk) -> Result<Vec<f32>> {
        let Self { cache, again, .. } = self;
        let (layer, tokens) = (chunk.layer, chunk.keys.dim(0)?);
        if layer == 0 {
            cache.abandon(); // what a chunk that failed halfway has left open
            let runs = [if tokens == 1 { TokenRun::decode(SEQUENCE) } else { TokenRun::chunk(SEQUENCE, tokens) }];
            cache.reserve_for_append(&runs).await?;
            cache.begin_append(&runs)?;
        }
        let queries = upload(cache.backend(), &chunk.queries).await?;
        let (keys, values) =
            (upload(cache.backend(), &chunk.keys).await?, upload(cache.backend(), &chunk.values).await?);
        let rows = RowLayout::token_major(tokens, cache.shape(layer)?);
        cache.store(layer, rows, &keys, &values).await?;
        let output = cache.attend(layer, &queries, ElementType::F32).await?;
        if let Some(again) = again {
            again.remember(layer, &chunk.queries)?;
        }
        if layer + 1 == cache.layers() {
            cache.commit()?;
            if tokens > 1 {
                cache.pack_windows(SEQUENCE).await?;
            }
            if let Some(again) = again {
                again.compress(cache, SEQUENCE).await?;
            }
        }
        Ok(cache.backend().download(&output).await?)
    }
}

impl<B: Backend + Clone> Attention for PackedAttention<B> {
    fn attend(&mut self, chunk: &Chunk) -> Result<Tensor> {
        let start = Instant::now();
        let output = block_on(self.store_and_attend(chunk))?;
        self.time += start.elapsed();
        let tokens = chunk.queries.dim(0)?;
        let width = output.len() / tokens;
        Ok(Tensor::from_vec(output, (tokens, width), &Device::Cpu)?)
    }
}
