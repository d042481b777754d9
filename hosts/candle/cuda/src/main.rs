//! Models on candle's CUDA device with kvpack as their attention and cache.

mod attention;
mod bridge;
mod fused;
mod fused_check;
mod scratch;
mod steps;
mod weights;

use anyhow::{Result, bail};
use candle_host::{Rig, ServeArgs, Study, checks};
use clap::Parser;
use steps::CudaRig;

/// Whole models on candle's CUDA device with kvpack as their attention and cache.
#[derive(Parser)]
enum Command {
    Serve(ServeArgs),
    #[command(subcommand)]
    Study(Study),
    /// Compares small models with what the command's CPU backend computes, and a queue with its requests alone.
    Check,
    /// Compares and times kvpack's attention over candle's tensors.
    Bridge,
}

fn main() -> Result<()> {
    let command = Command::parse();
    let rig = CudaRig::open()?;
    match command {
        Command::Serve(serve) => serve.run(&rig),
        Command::Study(study) => study.run(&rig),
        Command::Check => {
            let kernels = fused_check::run(&rig.kernels(), rig.device())?;
            match checks::run(&rig)? && kernels {
                true => Ok(()),
                false => bail!("something differs"),
            }
        }
        Command::Bridge => bridge::check(rig.backend(), rig.device()),
    }
}
