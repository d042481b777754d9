//! The forward pass of a BERT encoder with candle's operations, as MiniLM has it: embeddings of texts.

use std::path::Path;

use anyhow::Result;
use candle_core::{D, Device, Tensor};

use super::RankingError;
use super::encoder_files::{EncoderConfig, EncoderWeights, read_weights};
use super::word_pieces::WordPieces;
use crate::model::{Linear, softmax};

/// Word pieces of a text that are read; MiniLM was trained with this many.
const MOST_PIECES: usize = 256;

/// A text encoder: the mean of its last layer over the pieces of a text.
pub struct Encoder {
    pieces: WordPieces,
    longest: usize,
    heads: usize,
    /// `[pieces, width]`.
    words: Tensor,
    /// `[positions, width]`, that of the kind of text added.
    positions: Tensor,
    norm: Norm,
    layers: Vec<Layer>,
}

/// Subtracts the mean of a row, divides by its deviation, scales and shifts.
struct Norm {
    weight: Tensor,
    bias: Tensor,
    epsilon: f64,
}

struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    output_norm: Norm,
    up: Linear,
    down: Linear,
    down_norm: Norm,
}

impl Encoder {
    /// Loads the encoder of a folder.
    ///
    /// # Errors
    /// [`RankingError`].
    pub fn load(folder: &Path) -> Result<Self, RankingError> {
        let config = EncoderConfig::read(folder)?;
        let pieces = config.word_pieces(folder)?;
        let bytes = read_weights(folder)?;
        let weights = EncoderWeights::parse(&bytes)?;
        let (width, longest) = (config.hidden_size, config.max_position_embeddings);
        let positions = weights.tensor("embeddings.position_embeddings.weight", &[longest, width])?;
        let kinds = "embeddings.token_type_embeddings.weight";
        let of_kind = weights.tensor(kinds, &[config.type_vocab_size, width])?.narrow(0, 0, 1);
        let positions = of_kind.and_then(|kind| positions.broadcast_add(&kind));
        let layers = (0..config.num_hidden_layers).map(|layer| Layer::load(&weights, &config, layer));
        Ok(Self {
            pieces,
            longest: longest.min(MOST_PIECES),
            heads: config.num_attention_heads,
            words: weights.tensor("embeddings.word_embeddings.weight", &[config.vocab_size, width])?,
            positions: positions
                .map_err(|reason| RankingError::Tensor { name: kinds.into(), reason: reason.to_string() })?,
            norm: Norm::load(&weights, "embeddings.LayerNorm", &config)?,
            layers: layers.collect::<Result<_, _>>()?,
        })
    }

    /// The embedding of a text, of which the first 256 pieces are read. Its length means nothing.
    ///
    /// # Errors
    /// Those of candle.
    pub fn embed(&self, text: &str) -> Result<Vec<f32>> {
        let pieces = self.pieces.encode(text, self.longest)?;
        let positions = self.positions.narrow(0, 0, pieces.len())?;
        let words = self.words.index_select(&Tensor::new(pieces, &Device::Cpu)?, 0)?;
        let mut stream = self.norm.forward(&(words + positions)?)?;
        for layer in &self.layers {
            stream = layer.forward(&stream, self.heads)?;
        }
        Ok(stream.mean(0)?.to_vec1::<f32>()?)
    }
}

impl Layer {
    fn load(weights: &EncoderWeights<'_>, config: &EncoderConfig, layer: usize) -> Result<Self, RankingError> {
        let name = |part: &str| format!("encoder.layer.{layer}.{part}");
        let (width, inner) = (config.hidden_size, config.intermediate_size);
        let linear = |part: &str, inputs, outputs| weights.linear(&name(part), inputs, outputs);
        Ok(Self {
            query: linear("attention.self.query", width, width)?,
            key: linear("attention.self.key", width, width)?,
            value: linear("attention.self.value", width, width)?,
            output: linear("attention.output.dense", width, width)?,
            output_norm: Norm::load(weights, &name("attention.output.LayerNorm"), config)?,
            up: linear("intermediate.dense", width, inner)?,
            down: linear("output.dense", inner, width)?,
            down_norm: Norm::load(weights, &name("output.LayerNorm"), config)?,
        })
    }

    /// `[pieces, width]` to the same.
    fn forward(&self, x: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
        let (pieces, width) = x.dims2()?;
        let head_dim = width / heads;
        let by_head = |x: Tensor| x.reshape((pieces, heads, head_dim))?.transpose(0, 1)?.contiguous();
        let (query, key) = (by_head(self.query.forward(x)?)?, by_head(self.key.forward(x)?)?);
        let scores = (query.matmul(&key.transpose(1, 2)?)? / (head_dim as f64).sqrt())?;
        let attended = softmax(&scores)?.matmul(&by_head(self.value.forward(x)?)?)?;
        let attended = attended.transpose(0, 1)?.contiguous()?.reshape((pieces, width))?;
        let x = self.output_norm.forward(&(self.output.forward(&attended)? + x)?)?;
        let inner = self.up.forward(&x)?.gelu_erf()?;
        self.down_norm.forward(&(self.down.forward(&inner)? + x)?)
    }
}

impl Norm {
    fn load(weights: &EncoderWeights<'_>, name: &str, config: &EncoderConfig) -> Result<Self, RankingError> {
        let part = |part: &str| weights.tensor(&format!("{name}.{part}"), &[config.hidden_size]);
        Ok(Self { weight: part("weight")?, bias: part("bias")?, epsilon: config.layer_norm_eps })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let x = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let deviation = (x.sqr()?.mean_keepdim(D::Minus1)? + self.epsilon)?.sqrt()?;
        x.broadcast_div(&deviation)?.broadcast_mul(&self.weight)?.broadcast_add(&self.bias)
    }
}
