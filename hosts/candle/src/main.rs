//! Models on candle's CPU device with kvpack's CPU backend.

use anyhow::{Result, bail};
use candle_host::{CpuRig, ServeArgs, Study, checks};
use clap::Parser;

/// Whole models on candle's CPU device with kvpack as their attention and cache.
#[derive(Parser)]
enum Command {
    Serve(ServeArgs),
    #[command(subcommand)]
    Study(Study),
    /// Compares small models with what the command's CPU backend computes, and a queue with its requests alone.
    Check,
}

fn main() -> Result<()> {
    let rig = CpuRig::default();
    match Command::parse() {
        Command::Serve(serve) => serve.run(&rig),
        Command::Study(study) => study.run(&rig),
        Command::Check => match checks::run(&rig)? {
            true => Ok(()),
            false => bail!("something differs"),
        },
    }
}
