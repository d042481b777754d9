//! Decoders of GGUF files, read as the command reads them.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use kvpack_cli::{Tokenizer, WeightTensors, Weights};
use kvpack_serving::decoder::{Activation, Config, LocalLayers, RopePairs, Tensors};

use crate::Result;

/// A file whose tensors are dequantised to f32 as they are asked for.
pub struct Gguf {
    weights: Weights<BufReader<File>>,
    pub config: Config,
    pub tokenizer: Tokenizer,
    pub name: String,
}

impl Gguf {
    /// Reads the shape of a model.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        let weights = Weights::open(BufReader::new(file))?;
        let tokenizer = Tokenizer::read(weights.metadata())?;
        let given = kvpack_cli::Config::read(weights.metadata())?;
        let config = Config {
            layers: given.layers,
            width: given.width,
            feed_forward: given.feed_forward,
            attention: given.attention,
            vocabulary: tokenizer.vocabulary(),
            norm_epsilon: given.norm_epsilon,
            rope_base: given.rope_base,
            rope_pairs: match given.rope_pairs {
                kvpack_cli::RopePairs::Neighbours => RopePairs::Neighbours,
                kvpack_cli::RopePairs::Halves => RopePairs::Halves,
            },
            activation: match given.activation {
                kvpack_cli::Activation::Silu => Activation::Silu,
                kvpack_cli::Activation::Gelu => Activation::Gelu,
            },
            embedding_scale: given.embedding_scale,
            local: given.local.map(|of| LocalLayers { left: of.left, every: of.every, rope_base: of.rope_base }),
        };
        Ok(Self { weights, config, tokenizer, name: given.name })
    }
}

impl Tensors for Gguf {
    fn has(&self, name: &str) -> bool {
        WeightTensors::has(&self.weights, name)
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> std::result::Result<Vec<f32>, String> {
        let tensor = self.weights.tensor(name, shape).map_err(|error| error.to_string())?;
        tensor.flatten_all().and_then(|tensor| tensor.to_vec1()).map_err(|error| format!("tensor {name}: {error}"))
    }
}
