//! kvpack's attention: a [`ModelCache`].

use std::time::{Duration, Instant};

use anyhow::Result;
use candle_core::{Device, Tensor};
use kvpack::Backend;
use kvpack::backend::TensorRows;
use kvpack::cache::{CacheMemory, DenseLayer, MeasuredQueries, ModelCache, ModelRecipe, TokenRun};
use kvpack::plan::{ElementType, RowLayout};
use kvpack::policy::{Policy, Selection, Spans};
use pollster::block_on;

use super::dense_prompt::of_queries;
use super::{Attention, Chunk, Config, DensePrompt, ModelError};

/// The only sequence of the cache.
const SEQUENCE: usize = 0;

/// The cache of all layers, stored by a recipe.
///
/// A chunk of tokens is a step of the cache: the first layer opens it, the last one commits it.
pub struct PackedAttention<B: Backend> {
    cache: ModelCache<B>,
    time: Duration,
}

impl<B: Backend + Clone> PackedAttention<B> {
    /// An empty cache.
    ///
    /// # Errors
    /// When the recipe does not fit the model.
    pub fn new(backend: &B, config: &Config, recipe: &ModelRecipe) -> Result<Self> {
        if let Some(layer) = recipe.highest_layer().filter(|&layer| layer >= config.layers) {
            return Err(ModelError::Layer { recipe: recipe.to_string(), layer, layers: config.layers }.into());
        }
        let layer = |layer| (config.attention, recipe.layer(layer, &config.attention));
        let layers: Vec<_> = (0..config.layers).map(layer).collect();
        Ok(Self { cache: ModelCache::new(backend, &layers, 1)?, time: Duration::ZERO })
    }
}

impl<B: Backend + Clone> PackedAttention<B> {
    /// Stores what a policy keeps of a prompt that was read; `spans` say which of its tokens are images.
    ///
    /// # Errors
    /// What the policy, the device or the cache says.
    pub fn compress(&mut self, prompt: &DensePrompt, policy: &Policy, spans: &Spans) -> Result<Selection> {
        let start = Instant::now();
        let selection = block_on(self.observe_and_compress(prompt, policy, spans))?;
        self.time += start.elapsed();
        Ok(selection)
    }

    async fn observe_and_compress(
        &mut self,
        prompt: &DensePrompt,
        policy: &Policy,
        spans: &Spans,
    ) -> Result<Selection> {
        let Self { cache, .. } = self;
        let mut observed = cache.observe(policy.clone(), spans.clone())?;
        for layer in 0..cache.layers() {
            let (backend, shape) = (cache.backend(), cache.shape(layer)?);
            let (keys, values) = prompt.keys_and_values(layer)?;
            let rows = RowLayout::head_major(prompt.tokens(), shape);
            let dense = DenseLayer { rows, keys: upload(backend, keys).await?, values: upload(backend, values).await? };
            let Some(measured) = observed.query_rows() else {
                observed.observe(layer, dense, None)?;
                continue;
            };
            let layout = RowLayout::token_major(measured.len(), &of_queries(shape)?);
            let tensor = upload(backend, &prompt.queries(layer, measured)?).await?;
            let queries = TensorRows { tensor: &tensor, layout };
            observed.observe(layer, dense, Some(MeasuredQueries { queries, known_lse: None }))?;
        }
        Ok(cache.compress(SEQUENCE, &observed).await?)
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

    async fn store_and_attend(&mut self, chunk: &Chunk) -> Result<Vec<f32>> {
        let Self { cache, .. } = self;
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
        if layer + 1 == cache.layers() {
            cache.commit()?;
            if tokens > 1 {
                cache.pack_windows(SEQUENCE).await?;
            }
        }
        Ok(cache.backend().download(&output).await?)
    }
}

async fn upload<B: Backend>(backend: &B, tensor: &Tensor) -> Result<B::Tensor> {
    let elements = tensor.flatten_all()?.to_vec1::<f32>()?;
    Ok(backend.upload(elements.as_slice().into()).await?)
}

impl<B: Backend> Attention for PackedAttention<B> {
    fn attend(&mut self, chunk: &Chunk) -> Result<Tensor> {
        let start = Instant::now();
        let output = block_on(self.store_and_attend(chunk))?;
        self.time += start.elapsed();
        let tokens = chunk.queries.dim(0)?;
        let width = output.len() / tokens;
        Ok(Tensor::from_vec(output, (tokens, width), &Device::Cpu)?)
    }
}
