//! A prompt read with full-precision attention, as engines read theirs, of which a cache then stores what it keeps.

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use kvpack::AttentionShape;
use kvpack::policy::QueryRows;

use super::{Attention, CHUNK_TOKENS, Chunk, ExactAttention, Model};

/// The queries, keys and values of a prompt in all layers.
pub struct DensePrompt {
    exact: ExactAttention,
    /// `[tokens, query_heads, head_dim]` of each layer, chunk by chunk.
    queries: Vec<Vec<Tensor>>,
    tokens: usize,
    /// The residual stream `[tokens, width]` of the last chunk.
    stream: Option<Tensor>,
}

impl DensePrompt {
    /// Reads a prompt; `progress` is told of every chunk's tokens.
    ///
    /// # Errors
    /// Those of [`Model::forward`].
    pub fn read(model: &Model, tokens: &[u32], progress: impl Fn(usize)) -> Result<Self> {
        let (shape, layers) = (model.config.attention, model.config.layers);
        let exact = ExactAttention::new(shape, layers);
        let mut prompt = Self { exact, queries: vec![Vec::new(); layers], tokens: 0, stream: None };
        for chunk in tokens.chunks(CHUNK_TOKENS) {
            let position = prompt.tokens;
            prompt.stream = Some(model.forward(chunk, position, &mut prompt)?);
            prompt.tokens += chunk.len();
            progress(chunk.len());
        }
        Ok(prompt)
    }

    /// Tokens of the prompt.
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// The residual stream `[tokens, width]` of the last chunk; `None` of an empty prompt.
    pub const fn stream(&self) -> Option<&Tensor> {
        self.stream.as_ref()
    }

    /// Queries of these rows of a layer, `[rows, query_heads, head_dim]`.
    ///
    /// # Errors
    /// When there is no such layer or row.
    pub fn queries(&self, layer: usize, rows: &QueryRows) -> Result<Tensor> {
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
