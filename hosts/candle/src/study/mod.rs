//! The command `study`: what papers on packed caches measure, on models of real shape with random weights.

mod greedy;
mod measured;

use std::path::PathBuf;

use anyhow::Result;
use kvpack_cli::{Activation, Config, Model, RopePairs};
use kvpack_serving::study::{
    ContextOptions, DecodeOptions, PolicyOptions, RandomModel, StudyOptions, StudyReport, ThroughputOptions,
    VOCABULARY, context, decode, policy, throughput,
};
use kvpack_weights::Bits;

use crate::host::Host;
use crate::rig::Rig;
use crate::weights;
use measured::Measured;

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
    #[command(flatten)]
    random: RandomModel,
    /// Bits of the codes of projections: 2, 3, 4 or 8. Without this option projections are dense.
    #[arg(long, value_name = "BITS", value_parser = weights::bits)]
    weights: Option<Bits>,
    #[command(flatten)]
    study: StudyOptions,
}

impl Common {
    /// The model with random weights, on a device.
    fn model<R: Rig>(&self, rig: &R) -> Result<Model> {
        let shape = self.random.shape();
        let of = shape.config()?;
        let config = Config {
            name: shape.to_string(),
            layers: of.layers,
            width: of.width,
            feed_forward: of.feed_forward,
            attention: of.attention,
            context: 1 << 20,
            norm_epsilon: of.norm_epsilon,
            rope_base: of.rope_base,
            rope_pairs: RopePairs::Halves,
            activation: Activation::Silu,
            embedding_scale: of.embedding_scale,
            local: None,
        };
        let model = Model::random(config, VOCABULARY, rig.device(), rig.dtype())?;
        rig.on_device(weights::random_in_codes(rig, model, self.weights)?, rig.dtype())
    }
}

/// A model whose steps have up to `rows` rows.
fn host<R: Rig>(rig: &R, model: Model, rows: usize) -> Result<Host<R::Steps>> {
    let steps = rig.steps(&model, model.config.layers, rows)?;
    Ok(Host::new(model, steps))
}

/// Measures throughput under a memory budget, with random weights.
#[derive(clap::Args)]
pub struct ThroughputArgs {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    options: ThroughputOptions,
}

impl ThroughputArgs {
    fn run<R: Rig>(&self, rig: &R) -> Result<()> {
        let options = self.options.clone().sized(&self.common.random);
        let model = self.common.model(rig)?;
        let name = format!("{}, {}", model.config.name, options.budgets());
        let mut measured = Measured::new(rig, host(rig, model, options.rows())?.without_end());
        let report = StudyReport::begin(&measured, "throughput", name, &self.common.study);
        throughput(&mut measured, &report, &options)
    }
}

/// Tokens per second by recipe, batch and context, and what a step is made of.
#[derive(clap::Args)]
pub struct DecodeArgs {
    #[command(flatten)]
    common: Common,
    /// A GGUF file in place of random weights.
    #[arg(long)]
    model: Option<PathBuf>,
    #[command(flatten)]
    options: DecodeOptions,
    /// Launches every step kernel by kernel, without graphs.
    #[arg(long)]
    without_graphs: bool,
}

impl DecodeArgs {
    fn run<R: Rig>(&self, rig: &R) -> Result<()> {
        let options = self.options.clone().sized(&self.common.random);
        let model = match &self.model {
            Some(path) => {
                rig.on_device(weights::in_codes(rig, Model::load(path)?, self.common.weights)?, rig.dtype())?
            }
            None => self.common.model(rig)?,
        };
        let name = model.config.name.clone();
        let host = host(rig, model, options.most())?;
        let host = if self.without_graphs { host.without_records() } else { host };
        let mut measured = Measured::new(rig, host);
        let report = StudyReport::begin(&measured, "decode", name, &self.common.study);
        if options.greedy > 0 {
            let (host, text) = greedy::compared(rig, measured.into_host(), options.greedy)?;
            println!("{text}\n");
            measured = Measured::new(rig, host);
        }
        decode(&mut measured, &report, &options)
    }
}

/// Decoding, memory and prefill where a policy keeps a share of the prompt.
///
/// A prompt is an image and 50 tokens of text. It is read once; every sequence of a batch then keeps what the policy
/// chooses of it.
#[derive(clap::Args)]
pub struct PolicyArgs {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    options: PolicyOptions,
}

impl PolicyArgs {
    fn run<R: Rig>(&self, rig: &R) -> Result<()> {
        if self.options.draws_only(&self.common.study)? {
            return Ok(());
        }
        let options = self.options.clone().sized(&self.common.random);
        let model = self.common.model(rig)?;
        let name = model.config.name.clone();
        let mut measured = Measured::new(rig, host(rig, model, options.most())?);
        let report = StudyReport::begin(&measured, "policy", name, &self.common.study);
        policy(&mut measured, &report, &options)
    }
}

/// Time per output token against the context: f16, KIVI, uniform codes, and Cocktail's mixture of chunks, also without
/// reordering and without search.
#[derive(clap::Args)]
pub struct ContextArgs {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    options: ContextOptions,
}

impl ContextArgs {
    fn run<R: Rig>(&self, rig: &R) -> Result<()> {
        let options = self.options.clone().sized(&self.common.random);
        let model = self.common.model(rig)?;
        let name = model.config.name.clone();
        let mut measured = Measured::new(rig, host(rig, model, options.batch)?);
        let report = StudyReport::begin(&measured, "context", name, &self.common.study);
        context(&mut measured, &report, &options)
    }
}
