//! What the forward pass asks of attention, and candle's full-precision answer.

use anyhow::Result;
use candle_core::{D, DType, Device, Tensor};
use kvpack::AttentionShape;

use super::Config;

/// The newest tokens of a sequence at one layer, after position encoding.
pub struct Chunk {
    /// The layer.
    pub layer: usize,
    /// `[tokens, query_heads, head_dim]`.
    pub queries: Tensor,
    /// `[tokens, kv_heads, head_dim]`.
    pub keys: Tensor,
    /// `[tokens, kv_heads, head_dim]`.
    pub values: Tensor,
}

/// Attention with a memory: the cache of a sequence, layer by layer.
pub trait Attention {
    /// Remembers the keys and values of a chunk and attends with each of its queries to the tokens up to its own.
    /// The output is `[tokens, query_heads · head_dim]`.
    ///
    /// # Errors
    /// Those of the device or the cache.
    fn attend(&mut self, chunk: &Chunk) -> Result<Tensor>;
}

/// Full-precision attention by candle's operations: the reference.
#[derive(Clone)]
pub struct ExactAttention {
    shape: AttentionShape,
    /// Positions before its own that a query of each layer sees; none: all of them.
    windows: Vec<Option<usize>>,
    /// Keys and values so far, `[kv_heads, tokens, head_dim]`.
    layers: Vec<Option<(Tensor, Tensor)>>,
}

impl ExactAttention {
    /// An empty cache for a model.
    pub fn new(config: &Config) -> Self {
        let windows = (0..config.layers).map(|layer| config.layer_attention(layer).window()).collect();
        Self { shape: config.attention, windows, layers: vec![None; config.layers] }
    }

    /// Keys and values of a layer, `[kv_heads, tokens, head_dim]`, if it holds any.
    pub fn layer(&self, layer: usize) -> Option<&(Tensor, Tensor)> {
        self.layers.get(layer)?.as_ref()
    }
}

impl Attention for ExactAttention {
    fn attend(&mut self, chunk: &Chunk) -> Result<Tensor> {
        let new = (chunk.keys.transpose(0, 1)?.contiguous()?, chunk.values.transpose(0, 1)?.contiguous()?);
        let (keys, values) = match self.layers[chunk.layer].take() {
            Some((keys, values)) => (Tensor::cat(&[&keys, &new.0], 1)?, Tensor::cat(&[&values, &new.1], 1)?),
            None => new,
        };
        let (queries, heads, head_dim) = chunk.queries.dims3()?;
        let tokens = keys.dim(1)?;
        // The queries of a group are rows of one product: [kv_heads, group · queries, head_dim].
        let group = self.shape.group();
        let q = chunk.queries.transpose(0, 1)?.contiguous()?.reshape((heads / group, group * queries, head_dim))?;
        let scores = (q.matmul(&keys.transpose(1, 2)?)? / (head_dim as f64).sqrt())?;
        let scores = scores.reshape((heads, queries, tokens))?.broadcast_add(&causal_mask(
            queries,
            tokens,
            self.windows[chunk.layer],
        )?)?;
        let weights = softmax(&scores)?.reshape((heads / group, group * queries, tokens))?;
        let output = weights.matmul(&values)?.reshape((heads, queries, head_dim))?;
        self.layers[chunk.layer] = Some((keys, values));
        Ok(output.transpose(0, 1)?.contiguous()?.reshape((queries, heads * head_dim))?)
    }
}

/// 0 where query i of the newest `queries` tokens sees token j, -∞ elsewhere. It sees `left` tokens before its own, or
/// all.
fn causal_mask(queries: usize, tokens: usize, left: Option<usize>) -> candle_core::Result<Tensor> {
    let first = tokens - queries;
    let sees = |i: usize, j: usize| j <= first + i && left.is_none_or(|left| j + left >= first + i);
    let seen = |i: usize, j: usize| if sees(i, j) { 0f32 } else { f32::NEG_INFINITY };
    let mask: Vec<f32> = (0..queries).flat_map(|i| (0..tokens).map(move |j| seen(i, j))).collect();
    Tensor::from_vec(mask, (queries, tokens), &Device::Cpu)
}

/// Softmax of the rows.
pub fn softmax(scores: &Tensor) -> candle_core::Result<Tensor> {
    let scores = scores.to_dtype(DType::F32)?;
    let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
    weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)
}
