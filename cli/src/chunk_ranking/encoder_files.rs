//! A folder with a BERT encoder: `config.json`, `vocab.txt` and `model.safetensors`.

use std::path::Path;

use candle_core::{Device, Tensor};
use safetensors::SafeTensors;
use serde::Deserialize;

use super::RankingError;
use super::embeddings::{parse, read_file, tensor};
use super::word_pieces::WordPieces;
use crate::model::Linear;

/// The fields of `config.json` that are read, by their names there.
#[derive(Deserialize)]
pub struct EncoderConfig {
    model_type: String,
    hidden_act: String,
    /// Channels.
    pub hidden_size: usize,
    /// Channels inside a feed-forward layer.
    pub intermediate_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Heads of attention.
    pub num_attention_heads: usize,
    /// Word pieces of the longest text.
    pub max_position_embeddings: usize,
    /// Kinds of text; there is one here.
    pub type_vocab_size: usize,
    /// Word pieces.
    pub vocab_size: usize,
    /// Added to a variance before its root is taken.
    pub layer_norm_eps: f64,
}

impl EncoderConfig {
    /// Reads the description of an encoder.
    ///
    /// # Errors
    /// [`RankingError::Config`] and [`RankingError::Unreadable`].
    pub fn read(folder: &Path) -> Result<Self, RankingError> {
        let wrong = |reason: String| RankingError::Config { reason };
        let bytes = read_file(&folder.join("config.json"))?;
        let config: Self = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
        if config.model_type != "bert" || config.hidden_act != "gelu" {
            let (kind, act) = (&config.model_type, &config.hidden_act);
            return Err(wrong(format!("the model is a '{kind}' with '{act}'; a 'bert' with 'gelu' is implemented")));
        }
        let heads = config.num_attention_heads;
        if heads == 0 || config.hidden_size == 0 || !config.hidden_size.is_multiple_of(heads) {
            return Err(wrong(format!("{heads} heads do not share {} channels evenly", config.hidden_size)));
        }
        if config.num_hidden_layers == 0 || config.max_position_embeddings < 3 || config.type_vocab_size == 0 {
            let reason = "at least one layer, three positions and one kind of text are needed";
            return Err(wrong(reason.into()));
        }
        match config.layer_norm_eps {
            epsilon if epsilon > 0.0 && epsilon < 1.0 => Ok(config),
            epsilon => Err(wrong(format!("layer_norm_eps is {epsilon}; it must be between 0 and 1"))),
        }
    }

    /// The word pieces.
    ///
    /// # Errors
    /// [`RankingError::Vocabulary`] and [`RankingError::Unreadable`].
    pub fn word_pieces(&self, folder: &Path) -> Result<WordPieces, RankingError> {
        WordPieces::read(read_file(&folder.join("vocab.txt"))?, self.vocab_size)
    }
}

/// The bytes of `model.safetensors`.
///
/// # Errors
/// [`RankingError::Unreadable`].
pub fn read_weights(folder: &Path) -> Result<Vec<u8>, RankingError> {
    read_file(&folder.join("model.safetensors"))
}

/// The tensors of an encoder.
pub struct EncoderWeights<'a>(SafeTensors<'a>);

impl<'a> EncoderWeights<'a> {
    /// Reads their names and shapes.
    ///
    /// # Errors
    /// [`RankingError::NotSafetensors`].
    pub fn parse(bytes: &'a [u8]) -> Result<Self, RankingError> {
        Ok(Self(parse(bytes)?))
    }

    /// A tensor, which must have this shape.
    ///
    /// # Errors
    /// [`RankingError::Tensor`].
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, RankingError> {
        let wrong = |reason: String| RankingError::Tensor { name: name.into(), reason };
        let read = tensor(&self.0, name)?;
        if read.shape != shape {
            return Err(wrong(format!("its shape is {:?}, {shape:?} is needed", read.shape)));
        }
        Tensor::from_vec(read.elements, shape, &Device::Cpu).map_err(|reason| wrong(reason.to_string()))
    }

    /// A dense layer.
    ///
    /// # Errors
    /// [`RankingError::Tensor`].
    pub fn linear(&self, name: &str, inputs: usize, outputs: usize) -> Result<Linear, RankingError> {
        let weight = self.tensor(&format!("{name}.weight"), &[outputs, inputs])?;
        Ok(Linear::new(weight, Some(self.tensor(&format!("{name}.bias"), &[outputs])?)))
    }
}
