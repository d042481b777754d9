//! Models of real shape with random weights.

use burn::tensor::Device;
use clap::ValueEnum;
use kvpack::AttentionShape;
use kvpack_serving::decoder::{Activation, Config, RopePairs, Tensors};
use kvpack_serving::tiny;

use crate::Result;
use crate::decoder::Decoder;

/// Tokens that these models know.
pub const VOCABULARY: usize = 32_000;

/// A shape of a model; its weights are random.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    /// 32 layers, 32 query and 32 KV heads of 128, 4096 channels, 11008 inside (LLaVA-1.5-7B, Llama 2 7B)
    #[value(name = "7b")]
    B7,
    /// 32 layers, 32 query and 8 KV heads of 128, 4096 channels, 14336 inside (Llama 3 8B)
    #[value(name = "8b")]
    B8,
    /// 2 layers, 4 query and 4 KV heads of 64, 256 channels, 512 inside
    Small,
}

impl Shape {
    /// What tables call the model.
    pub const fn name(self) -> &'static str {
        match self {
            Self::B7 => "7B, random weights",
            Self::B8 => "8B, random weights",
            Self::Small => "small, random weights",
        }
    }

    /// A decoder of this shape on a device, in f32.
    pub fn decoder(self, device: &Device) -> Result<Decoder> {
        let (layers, heads, kv_heads, head_dim, feed_forward) = match self {
            Self::B7 => (32, 32, 32, 128, 11008),
            Self::B8 => (32, 32, 8, 128, 14336),
            Self::Small => (2, 4, 4, 64, 512),
        };
        let config = Config {
            layers,
            width: heads * head_dim,
            feed_forward,
            attention: AttentionShape::new(heads, kv_heads, head_dim)?,
            vocabulary: VOCABULARY,
            norm_epsilon: 1e-5,
            rope_base: 10_000.0,
            rope_pairs: RopePairs::Halves,
            activation: Activation::Silu,
            embedding_scale: 1.0,
            local: None,
        };
        Decoder::load(device, config, &mut RandomWeights::new())
    }
}

/// Tensors with the same random numbers again and again: billions of new ones would take minutes.
struct RandomWeights {
    numbers: Vec<f32>,
}

impl RandomWeights {
    fn new() -> Self {
        const NUMBERS: usize = (1 << 20) + 7; // rows of matrices begin at different ones
        Self { numbers: tiny::random(&mut 3, NUMBERS, 0.04) }
    }
}

impl Tensors for RandomWeights {
    fn has(&self, name: &str) -> bool {
        name == "output.weight"
    }

    fn tensor(&mut self, _: &str, shape: &[usize]) -> std::result::Result<Vec<f32>, String> {
        let elements = shape.iter().product();
        match shape {
            [_] => Ok(vec![1.0; elements]), // norms
            _ => Ok(self.numbers.iter().copied().cycle().take(elements).collect()),
        }
    }
}
