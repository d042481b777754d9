//! Shapes of models whose weights are random.

use std::fmt;

use clap::ValueEnum;
use kvpack::AttentionShape;

use crate::decoder::{Activation, Config, RopePairs};

/// Tokens that models with random weights know.
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
    /// 40 layers, 40 query and 40 KV heads of 128, 5120 channels, 13824 inside (LLaVA-1.5-13B)
    #[value(name = "13b")]
    B13,
    /// 2 layers, 4 query and 4 KV heads of 64, 256 channels, 512 inside
    Small,
}

impl Shape {
    /// The decoder of this shape.
    ///
    /// # Errors
    /// [`kvpack::Error`] never: the shapes have kernels.
    pub fn config(self) -> kvpack::Result<Config> {
        let (layers, heads, kv_heads, head_dim, feed_forward) = match self {
            Self::B7 => (32, 32, 32, 128, 11008),
            Self::B8 => (32, 32, 8, 128, 14336),
            Self::B13 => (40, 40, 40, 128, 13824),
            Self::Small => (2, 4, 4, 64, 512),
        };
        Ok(Config {
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
        })
    }
}

/// What tables call the model.
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::B7 => "7B",
            Self::B8 => "8B",
            Self::B13 => "13B",
            Self::Small => "small",
        };
        write!(f, "{name}, random weights")
    }
}
