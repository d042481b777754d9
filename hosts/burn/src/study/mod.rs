//! Studies of whole models: steps of decoding of a GGUF file's model, and what papers on packed caches measure, with
//! models of random weights.

mod gguf;
mod greedy;
mod measured;
mod own;
mod prompt;
mod random;
mod steps;

use std::path::PathBuf;

use burn::tensor::Device;
use kvpack::wgpu::Wgpu;
use kvpack_serving::study::{
    ContextOptions, DecodeOptions, PolicyOptions, RandomModel, StudyOptions, StudyReport, ThroughputOptions, context,
    decode, policy, throughput,
};

use crate::Result;
use crate::decoder::Decoder;
use crate::host::Host;
use gguf::Gguf;
use measured::Measured;

/// Studies of whole models with packed caches.
#[derive(clap::Subcommand)]
pub enum Study {
    /// Times steps of decoding of a GGUF file's model
    Decode(DecodeArgs),
    /// Throughput under a memory budget (CalibQuant, Tables 5-8)
    Throughput(ThroughputArgs),
    /// Prompts of which a policy keeps a share (VL-Cache, LOOK-M)
    Policy(PolicyArgs),
    /// Time per output token against the context (Cocktail)
    Context(ContextArgs),
}

impl Study {
    /// Runs the study. False where texts differ.
    pub fn run(&self, device: &Device, backend: &Wgpu) -> Result<bool> {
        match self {
            Self::Decode(study) => return study.run(device, backend),
            Self::Throughput(study) => study.run(device, backend)?,
            Self::Policy(study) => study.run(device, backend)?,
            Self::Context(study) => study.run(device, backend)?,
        }
        Ok(true)
    }
}

/// A model with random weights whose steps have up to `rows` rows.
fn random<'a>(device: &'a Device, backend: &Wgpu, model: &RandomModel, rows: usize) -> Result<Measured<'a>> {
    let host = Host::new(backend, random::decoder(model.shape(), device)?, rows, None)?;
    Ok(Measured::new(device, backend, host))
}

/// Steps of decoding with kvpack's attention and with burn's own.
#[derive(clap::Args)]
pub struct DecodeArgs {
    /// A GGUF file.
    #[arg(long)]
    model: PathBuf,
    #[command(flatten)]
    options: DecodeOptions,
    /// The most bytes, in GiB, that burn's own keys and values may take.
    #[arg(long, default_value_t = 32)]
    own_gib: usize,
    #[command(flatten)]
    study: StudyOptions,
}

impl DecodeArgs {
    /// Runs the study. False where texts differ.
    fn run(&self, device: &Device, backend: &Wgpu) -> Result<bool> {
        let mut gguf = Gguf::open(&self.model)?;
        let config = gguf.config.clone();
        let decoder = Decoder::load(device, config, &mut gguf)?;
        let host = Host::new(backend, decoder, self.options.most(), None)?;
        let mut measured = Measured::new(device, backend, host).with_own_bytes(self.own_gib.saturating_mul(1 << 30));
        let report = StudyReport::begin(&measured, "decode", gguf.name.clone(), &self.study);
        let greedy = self.options.greedy;
        let same = greedy == 0 || greedy::compared(device, backend, measured.host(), (&gguf, greedy))?;
        decode(&mut measured, &report, &self.options)?;
        Ok(same)
    }
}

/// Throughput under a memory budget, with random weights.
#[derive(clap::Args)]
pub struct ThroughputArgs {
    #[command(flatten)]
    random: RandomModel,
    #[command(flatten)]
    options: ThroughputOptions,
    #[command(flatten)]
    study: StudyOptions,
}

impl ThroughputArgs {
    fn run(&self, device: &Device, backend: &Wgpu) -> Result<()> {
        let options = self.options.clone().sized(&self.random);
        let mut measured = random(device, backend, &self.random, options.rows())?;
        let name = format!("{}, {}", self.random.shape(), options.budgets());
        let report = StudyReport::begin(&measured, "throughput", name, &self.study);
        throughput(&mut measured, &report, &options)
    }
}

/// Decoding, memory and prefill where a policy keeps a share of the prompt, with random weights.
///
/// A prompt is an image and 50 tokens of text. It is read once; every sequence of a batch then keeps what the policy
/// chooses of it.
#[derive(clap::Args)]
pub struct PolicyArgs {
    #[command(flatten)]
    random: RandomModel,
    #[command(flatten)]
    options: PolicyOptions,
    #[command(flatten)]
    study: StudyOptions,
}

impl PolicyArgs {
    fn run(&self, device: &Device, backend: &Wgpu) -> Result<()> {
        if self.options.draws_only(&self.study)? {
            return Ok(());
        }
        let options = self.options.clone().sized(&self.random);
        let mut measured = random(device, backend, &self.random, options.most())?;
        let report = StudyReport::begin(&measured, "policy", self.random.shape().to_string(), &self.study);
        policy(&mut measured, &report, &options)
    }
}

/// Time per output token against the context, with random weights.
#[derive(clap::Args)]
pub struct ContextArgs {
    #[command(flatten)]
    random: RandomModel,
    #[command(flatten)]
    options: ContextOptions,
    #[command(flatten)]
    study: StudyOptions,
}

impl ContextArgs {
    fn run(&self, device: &Device, backend: &Wgpu) -> Result<()> {
        let options = self.options.clone().sized(&self.random);
        let mut measured = random(device, backend, &self.random, options.batch)?;
        let report = StudyReport::begin(&measured, "context", self.random.shape().to_string(), &self.study);
        context(&mut measured, &report, &options)
    }
}
