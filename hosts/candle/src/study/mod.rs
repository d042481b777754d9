//! The command `study`: what papers on packed caches measure, on models of real shape with random weights.

mod context;
mod decode;
mod greedy;
mod policy;
mod report;
mod throughput;

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::ValueEnum;
use kvpack::AttentionShape;
use kvpack_cli::{Activation, Config, Model, RopePairs};
use kvpack_weights::Bits;

use crate::rig::Rig;
use crate::weights;

pub use context::ContextArgs;
pub use decode::DecodeArgs;
pub use policy::PolicyArgs;
pub use throughput::ThroughputArgs;

/// Tokens that random models know.
const VOCABULARY: usize = 32_000;

/// Studies of whole models with packed caches.
#[derive(clap::Subcommand)]
pub enum Study {
    /// Throughput under a memory budget (CalibQuant, Tables 5-8)
    Throughput(ThroughputArgs),
    /// A step of decoding as a sum, next to candle's own attention
    Decode(DecodeArgs),
    /// Prompts of which a policy keeps a share (VL-Cache, LOOK-M)
    Policy(PolicyArgs),
    /// Time per output token against the context (Cocktail)
    Context(ContextArgs),
}

impl Study {
    /// Runs the study on a device.
    ///
    /// # Errors
    /// What is wrong with the arguments, and what the device reports.
    pub fn run<R: Rig>(&self, rig: &R) -> Result<()> {
        match self {
            Self::Throughput(study) => study.run(rig),
            Self::Decode(study) => study.run(rig),
            Self::Policy(study) => study.run(rig),
            Self::Context(study) => study.run(rig),
        }
    }
}

/// What all studies are told.
#[derive(clap::Args)]
struct Common {
    /// The shape of the model, whose weights are random.
    #[arg(long, value_enum, default_value = "8b")]
    shape: Shape,
    /// The shape `small` and the smallest sizes, on any machine.
    #[arg(long)]
    quick: bool,
    /// Bits of the codes of projections: 2, 3, 4 or 8. Without this option projections are dense.
    #[arg(long, value_name = "BITS", value_parser = weights::bits)]
    weights: Option<Bits>,
    /// Writes the rows as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Writes a plot as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

impl Common {
    /// The shape, in its small form where asked for.
    fn shape(&self) -> Shape {
        if self.quick { Shape::Small } else { self.shape }
    }

    /// The model, on a device.
    fn model<R: Rig>(&self, rig: &R) -> Result<Model> {
        self.shape().model(rig, self.weights)
    }
}

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
    fn model<R: Rig>(self, rig: &R, weights: Option<Bits>) -> Result<Model> {
        let (layers, heads, kv_heads, head_dim, feed_forward) = match self {
            Self::B7 => (32, 32, 32, 128, 11008),
            Self::B8 => (32, 32, 8, 128, 14336),
            Self::B13 => (40, 40, 40, 128, 13824),
            Self::Small => (2, 4, 4, 64, 512),
        };
        let config = Config {
            name: format!("{self}, random weights"),
            layers,
            width: heads * head_dim,
            feed_forward,
            attention: AttentionShape::new(heads, kv_heads, head_dim)?,
            context: 1 << 20,
            norm_epsilon: 1e-5,
            rope_base: 10_000.0,
            rope_pairs: RopePairs::Halves,
            activation: Activation::Silu,
            embedding_scale: 1.0,
            local: None,
        };
        let model = Model::random(config, VOCABULARY, rig.device(), rig.dtype())?;
        rig.on_device(weights::random_in_codes(rig, model, weights)?, rig.dtype())
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::B7 => "7B",
            Self::B8 => "8B",
            Self::B13 => "13B",
            Self::Small => "small",
        })
    }
}

/// The model of a file, or a random one.
fn model_of<R: Rig>(rig: &R, file: Option<&Path>, common: &Common) -> Result<Model> {
    match file {
        Some(path) => rig.on_device(weights::in_codes(rig, Model::load(path)?, common.weights)?, rig.dtype()),
        None => common.model(rig),
    }
}

/// Bytes of the keys and values of some tokens in f16.
fn f16_bytes(config: &Config, tokens: usize) -> u64 {
    (config.layers * 2 * config.attention.kv_heads() * config.attention.head_dim() * 2 * tokens) as u64
}

/// Whether a device has room for this many bytes and as many more as a step needs.
fn has_room<R: Rig>(rig: &R, bytes: u64) -> bool {
    const FOR_STEPS: u64 = 2 << 30;
    rig.free_bytes().is_none_or(|free| bytes + FOR_STEPS <= free)
}
