//! A prompt read with full-precision attention, as engines read theirs, of which a cache then stores what it keeps.

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use kvpack::policy::QueryPositions;
use kvpack::{AttentionShape, Backend};

use super::{Attention, CHUNK_TOKENS, Chunk, Config, ExactAttention, KeyBias, Model};

/// The queries, keys and values of a prompt in all layers. Clones share what was read.
#[derive(Clone)]
pub struct DensePrompt {
    exact: ExactAttention,
    /// `[tokens, query_heads, head_dim]` of each layer, chunk by chunk.
    queries: Vec<Vec<Tensor>>,
    tokens: usize,
}

impl DensePrompt {
    /// A prompt of which nothing was read.
    pub fn new(config: &Config) -> Self {
        let exact = ExactAttention::new(config);
        Self { exact, queries: vec![Vec::new(); config.layers], tokens: 0 }
    }

    /// Reads on, and returns the residual stream `[tokens, width]` of these tokens.
    ///
    /// # Errors
    /// Those of [`Model::forward`].
    pub fn read(&mut self, model: &Model, tokens: &[u32]) -> Result<Tensor> {
        let mut streams = Vec::new();
        for chunk in tokens.chunks(CHUNK_TOKENS) {
            let position = self.tokens;
            streams.push(model.forward(chunk, position, self)?);
            self.tokens += chunk.len();
        }
        Ok(Tensor::cat(&streams, 0)?)
    }

    /// Tokens of the prompt.
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// What the keys of the prompt have in common.
    ///
    /// # Errors
    /// When nothing was read.
    pub fn bias(&self, model: &Model) -> Result<KeyBias> {
        let mut bias = KeyBias::new(model.config.attention, model.config.layers);
        for layer in 0..model.config.layers {
            let (keys, _) = self.keys_and_values(layer)?;
            bias.add(layer, &keys.transpose(0, 1)?.contiguous()?.flatten_all()?.to_vec1::<f32>()?);
        }
        Ok(bias)
    }

    /// Queries of these rows of a layer, `[rows, query_heads, head_dim]`.
    ///
    /// # Errors
    /// When there is no such layer or row.
    pub fn queries(&self, layer: usize, rows: &QueryPositions) -> Result<Tensor> {
        let chunks = self.queries.get(layer).with_context(|| format!("the prompt has no layer {layer}"))?;
        let rows = Tensor::new(rows.positions(), &Device::Cpu)?;
        Ok(Tensor::cat(chunks, 0)?.index_select(&rows, 0)?)
    }

    /// Keys and values of a layer, `[kv_heads, tokens, head_dim]`.
    ///
    /// # Errors
    /// When there is no such layer.
    pub fn keys_and_values(&self, layer: usize) -> Result<&(Tensor, Tensor)> {
        self.exact.layer(layer).with_context(|| format!("the prompt has no layer {layer}"))
    }
}

impl Attention for DensePrompt {
    fn attend(&mut self, chunk: &Chunk) -> Result<Tensor> {
        self.queries[chunk.layer].push(chunk.queries.clone());
        self.exact.attend(chunk)
    }
}

/// The shape of queries as rows of their own heads.
pub(super) fn of_queries(shape: &AttentionShape) -> kvpack::Result<AttentionShape> {
    AttentionShape::new(shape.query_heads(), shape.query_heads(), shape.head_dim())
}

/// The elements of a tensor, on a device.
pub(super) async fn upload<B: Backend>(backend: &B, tensor: &Tensor) -> Result<B::Tensor> {
    let elements = tensor.flatten_all()?.to_vec1::<f32>()?;
    Ok(backend.upload(elements.as_slice().into()).await?)
}
