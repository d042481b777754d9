//! A transformer block: its weights, and projections that share their input as one.

use candle_core::{DType, Device, Tensor};

use super::ModelError;
use super::config::{Activation, Config};
use super::fused::Fused;
use super::projections::{Input, Projection};
use super::weights::{Linear, Tensors};

/// A transformer block.
pub struct Layer {
    pub(super) attention_norm: Tensor,
    pub(super) query: Linear,
    pub(super) key: Linear,
    pub(super) value: Linear,
    /// Norms of the rows of queries and of keys, before they are rotated.
    pub(super) query_norm: Option<Tensor>,
    pub(super) key_norm: Option<Tensor>,
    pub(super) attention_output: Linear,
    /// Norms of what attention and feed-forward add to the stream.
    pub(super) attention_output_norm: Option<Tensor>,
    pub(super) feed_forward_norm: Tensor,
    pub(super) feed_forward_output_norm: Option<Tensor>,
    gate: Linear,
    up: Linear,
    pub(super) down: Linear,
    joined: Joined,
}

/// Projections that share their input, as one product.
#[derive(Default)]
struct Joined {
    /// Queries, keys and values.
    heads: Option<Linear>,
    /// Gate and up.
    gates: Option<Linear>,
}
impl Layer {
    pub(super) fn load(weights: &mut impl Tensors, config: &Config, layer: usize) -> Result<Self, ModelError> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let (width, shape) = (config.width, &config.attention);
        let queries = shape.query_heads() * shape.head_dim();
        let keys = shape.kv_heads() * shape.head_dim();
        let inner = config.feed_forward;
        let mut norm = |part: &str, channels: usize| {
            let name = name(&format!("{part}.weight"));
            if weights.has(&name) { weights.tensor(&name, &[channels]).map(Some) } else { Ok(None) }
        };
        let [query_norm, key_norm] = [norm("attn_q_norm", shape.head_dim())?, norm("attn_k_norm", shape.head_dim())?];
        let [after_attention, after_feed_forward] =
            [norm("post_attention_norm", width)?, norm("post_ffw_norm", width)?];
        Ok(Self {
            query_norm,
            key_norm,
            attention_output_norm: after_attention,
            feed_forward_output_norm: after_feed_forward,
            attention_norm: weights.tensor(&name("attn_norm.weight"), &[width])?,
            query: weights.linear(&name("attn_q"), width, queries)?,
            key: weights.linear(&name("attn_k"), width, keys)?,
            value: weights.linear(&name("attn_v"), width, keys)?,
            attention_output: weights.linear(&name("attn_output"), queries, width)?,
            feed_forward_norm: weights.tensor(&name("ffn_norm.weight"), &[width])?,
            gate: weights.linear(&name("ffn_gate"), width, inner)?,
            up: weights.linear(&name("ffn_up"), width, inner)?,
            down: weights.linear(&name("ffn_down"), inner, width)?,
            joined: Joined::default(),
        })
    }

    pub(super) fn moved(self, device: &Device, dtype: DType) -> candle_core::Result<Self> {
        let norm = |norm: Tensor| norm.to_device(device);
        let some_norm = |weight: Option<Tensor>| weight.map(norm).transpose();
        let linear = |linear: Linear| linear.moved(device, dtype);
        Ok(Self {
            attention_norm: norm(self.attention_norm)?,
            query: linear(self.query)?,
            key: linear(self.key)?,
            value: linear(self.value)?,
            query_norm: some_norm(self.query_norm)?,
            key_norm: some_norm(self.key_norm)?,
            attention_output: linear(self.attention_output)?,
            attention_output_norm: some_norm(self.attention_output_norm)?,
            feed_forward_norm: norm(self.feed_forward_norm)?,
            feed_forward_output_norm: some_norm(self.feed_forward_output_norm)?,
            gate: linear(self.gate)?,
            up: linear(self.up)?,
            down: linear(self.down)?,
            joined: Joined {
                heads: self.joined.heads.map(linear).transpose()?,
                gates: self.joined.gates.map(linear).transpose()?,
            },
        })
    }

    /// A projection.
    pub fn projection(&mut self, projection: Projection) -> &mut Linear {
        match projection {
            Projection::Query => &mut self.query,
            Projection::Key => &mut self.key,
            Projection::Value => &mut self.value,
            Projection::AttentionOutput => &mut self.attention_output,
            Projection::Gate => &mut self.gate,
            Projection::Up => &mut self.up,
            Projection::Down => &mut self.down,
        }
    }

    /// What multiplies: each projection, or what they were joined to.
    pub(super) fn products(&mut self) -> impl Iterator<Item = &mut Linear> {
        let Self { query, key, value, attention_output, gate, up, down, joined: Joined { heads, gates }, .. } = self;
        let all = [query, key, value, attention_output, gate, up, down].into_iter().chain(heads).chain(gates);
        all.filter(|linear| !linear.is_joined())
    }

    /// Queries, keys and values become one product, and gate and up another, where their weights are dense and no norm
    /// comes between.
    pub(super) fn join(&mut self) -> candle_core::Result<()> {
        let Self { query, key, value, gate, up, query_norm, key_norm, joined, .. } = self;
        if query_norm.is_none() && key_norm.is_none() && joined.heads.is_none() {
            joined.heads = Linear::joined(&mut [query, key, value])?;
        }
        if joined.gates.is_none() {
            joined.gates = Linear::joined(&mut [gate, up])?;
        }
        Ok(())
    }

    /// Queries, keys and values behind one another in each row, where they are one product.
    pub(super) fn joined_heads(&self) -> Option<&Linear> {
        self.joined.heads.as_ref()
    }

    pub(super) fn norms(&mut self) -> impl Iterator<Item = &mut Tensor> {
        let Self { query_norm, key_norm, attention_output_norm, feed_forward_output_norm, .. } = self;
        let some = [query_norm, key_norm, attention_output_norm, feed_forward_output_norm];
        [&mut self.attention_norm, &mut self.feed_forward_norm]
            .into_iter()
            .chain(some.into_iter().filter_map(Option::as_mut))
    }

    /// The weights of the norm that makes an input, where one does.
    pub fn norm_before(&mut self, input: Input) -> Option<&mut Tensor> {
        match input {
            Input::Attention => Some(&mut self.attention_norm),
            Input::FeedForward => Some(&mut self.feed_forward_norm),
            Input::AttentionOutput | Input::Down => None,
        }
    }

    /// activation(gate x) · up x.
    pub(super) fn gated(
        &self,
        x: &Tensor,
        activation: Activation,
        fused: Option<&dyn Fused>,
    ) -> candle_core::Result<Tensor> {
        let (gate, up) = match (&self.joined.gates, fused) {
            (Some(gates), Some(fused)) => return fused.gate(&gates.forward(x)?, activation),
            (Some(gates), None) => {
                let [gate, up] = columns(&gates.forward(x)?, [1, 1])?;
                (gate, up)
            }
            (None, _) => (self.gate.forward(x)?, self.up.forward(x)?),
        };
        match activation {
            Activation::Silu => gate.silu()? * up,
            Activation::Gelu => gate.gelu()? * up,
        }
    }
}

/// Columns of a matrix as matrices of their own, in these proportions.
pub(super) fn columns<const N: usize>(x: &Tensor, parts: [usize; N]) -> candle_core::Result<[Tensor; N]> {
    let unit = x.dim(1)? / parts.iter().sum::<usize>().max(1);
    let (mut first, mut made) = (0, [(); N].map(|()| x.clone()));
    for (made, part) in made.iter_mut().zip(parts) {
        *made = x.narrow(1, first, part * unit)?.contiguous()?;
        first += part * unit;
    }
    Ok(made)
}
