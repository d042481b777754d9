//! Whole models on burn with kvpack as their attention and cache, on wgpu.
//!
//! Without arguments the program checks itself: what is between burn and kvpack (`bridge`), and a small model
//! (`checks`). With the feature `studies`, `decode` times steps of a GGUF file's model, and `throughput`,
//! `policy` and `context` repeat studies of papers with models of random weights.

mod attention;
mod bridge;
mod checks;
#[cfg(feature = "studies")]
mod context;
#[cfg(feature = "studies")]
mod decode;
mod decoder;
#[cfg(feature = "studies")]
mod gguf;
mod host;
#[cfg(feature = "studies")]
mod own;
#[cfg(feature = "studies")]
mod policy;
mod projections;
#[cfg(feature = "studies")]
mod prompt;
#[cfg(feature = "studies")]
mod report;
#[cfg(feature = "studies")]
mod shape;
#[cfg(feature = "studies")]
mod steps;
#[cfg(feature = "studies")]
mod throughput;
mod trace;

use std::process::ExitCode;

use clap::Parser;
use kvpack::backend::Device as _;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Whole models on burn with kvpack as their attention and cache, on wgpu.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Compares the bridge with burn's own attention, and small models with the command's CPU backend; the default
    Check,
    /// Times steps of decoding of a GGUF file's model
    #[cfg(feature = "studies")]
    Decode(decode::DecodeArgs),
    /// Throughput under a memory budget (CalibQuant, Tables 5-8)
    #[cfg(feature = "studies")]
    Throughput(throughput::ThroughputArgs),
    /// Prompts of which a policy keeps a share (VL-Cache, LOOK-M)
    #[cfg(feature = "studies")]
    Policy(policy::PolicyArgs),
    /// Time per output token against the context (Cocktail)
    #[cfg(feature = "studies")]
    Context(context::ContextArgs),
}

fn main() -> Result<ExitCode> {
    let command = Arguments::parse().command.unwrap_or(Command::Check);
    trace::start();
    let (device, backend) = attention::open()?;
    println!("{}", backend.name());
    let passed = match command {
        Command::Check => {
            let mut passed = bridge::check(&device, &backend)?;
            passed &= checks::logits(&device, &backend)?;
            passed & checks::queue(&device, &backend)?
        }
        #[cfg(feature = "studies")]
        Command::Decode(decode) => decode.run(&device, &backend)?,
        #[cfg(feature = "studies")]
        Command::Throughput(study) => study.run(&device, &backend)?,
        #[cfg(feature = "studies")]
        Command::Policy(study) => study.run(&device, &backend)?,
        #[cfg(feature = "studies")]
        Command::Context(study) => study.run(&device, &backend)?,
    };
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
