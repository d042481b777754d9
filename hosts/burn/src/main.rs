//! Whole models on burn with kvpack as their attention and cache, on wgpu.
//!
//! Without arguments the program checks itself: what is between burn and kvpack (`bridge`), and a small model
//! (`checks`). With the feature `studies`, `decode` times steps of a GGUF file's model, and `throughput`,
//! `policy` and `context` repeat studies of papers with models of random weights.

mod attention;
mod bridge;
mod checks;
mod decoder;
mod host;
mod projections;
#[cfg(feature = "studies")]
mod study;
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
    #[cfg(feature = "studies")]
    #[command(flatten)]
    Study(study::Study),
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
        Command::Study(study) => study.run(&device, &backend)?,
    };
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
