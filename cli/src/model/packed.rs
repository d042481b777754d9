//! kvpack's attention: one [`KvCache`] per layer.

use std::time::{Duration, Instant};

use anyhow::Result;
use candle_core::{Device, Tensor};
use kvpack::Backend;
use kvpack::cache::{CacheMemory, KvCache, ModelRecipe};
use kvpack::plan::{ElementType, RowLayout};
use pollster::block_on;

use super::{Attention, Chunk, Config, ModelError};

/// The only sequence of each cache.
const SEQUENCE: usize = 0;

/// Caches of all layers, stored by a recipe.
pub struct PackedAttention<B: Backend> {
    layers: Vec<KvCache<B>>,
    time: Duration,
}

impl<B: Backend + Clone> PackedAttention<B> {
    /// Empty caches.
    ///
    /// # Errors
    /// When the recipe does not fit the model.
    pub fn new(backend: &B, config: &Config, recipe: &ModelRecipe) -> Result<Self> {
        if let Some(layer) = recipe.highest_layer().filter(|&layer| layer >= config.layers) {
            return Err(ModelError::Layer { recipe: recipe.to_string(), layer, layers: config.layers }.into());
        }
        let cache = |layer| KvCache::new(backend.clone(), config.attention, 1, recipe.layer(layer, &config.attention));
        Ok(Self { layers: (0..config.layers).map(cache).collect::<kvpack::Result<_>>()?, time: Duration::ZERO })
    }
}

impl<B: Backend> PackedAttention<B> {
    /// Time spent storing and attending so far, transfers included.
    pub fn time(&self) -> Duration {
        self.time
    }

    /// Bytes of each layer.
    pub fn memory(&self) -> impl Iterator<Item = CacheMemory> {
        self.layers.iter().map(KvCache::memory)
    }

    async fn store_and_attend(cache: &mut KvCache<B>, chunk: &Chunk) -> Result<Vec<f32>> {
        let backend = cache.backend();
        let upload = async |tensor: &Tensor| -> Result<B::Tensor> {
            let elements = tensor.flatten_all()?.to_vec1::<f32>()?;
            Ok(backend.upload(elements.as_slice().into()).await?)
        };
        let (queries, keys) = (upload(&chunk.queries).await?, upload(&chunk.keys).await?);
        let values = upload(&chunk.values).await?;
        let rows = RowLayout::token_major(chunk.keys.dim(0)?, cache.shape());
        let output = if rows.tokens == 1 {
            cache.append(rows, &keys, &values).await?;
            cache.attend(&queries, ElementType::F32).await?
        } else {
            cache.extend(SEQUENCE, rows, &keys, &values).await?;
            let output = cache.attend_causal(SEQUENCE, &queries, ElementType::F32).await?;
            cache.pack_windows(SEQUENCE).await?;
            output
        };
        Ok(cache.backend().download(&output).await?)
    }
}

impl<B: Backend> Attention for PackedAttention<B> {
    fn attend(&mut self, chunk: &Chunk) -> Result<Tensor> {
        let start = Instant::now();
        let output = block_on(Self::store_and_attend(&mut self.layers[chunk.layer], chunk))?;
        self.time += start.elapsed();
        let tokens = chunk.queries.dim(0)?;
        let width = output.len() / tokens;
        Ok(Tensor::from_vec(output, (tokens, width), &Device::Cpu)?)
    }
}
