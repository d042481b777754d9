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
    Check {
        /// Runs kvpack's own checks whose name contains this in place of those.
        #[arg(long, value_name = "TEXT")]
        kernels: Option<String>,
    },
    /// Compares and times kvpack's attention over candle's tensors.
    Bridge,
}

fn main() -> Result<()> {
    let command = Command::parse();
    let rig = CudaRig::open()?;
    match command {
        Command::Serve(serve) => serve.run(&rig),
        Command::Study(study) => study.run(&rig),
        Command::Check { kernels: Some(filter) } => match checks::kernels(&rig, &filter)? {
            true => Ok(()),
            false => bail!("something differs"),
        },
        Command::Check { kernels: None } => {
            let kernels = fused_check::run(&rig.kernels(), rig.device())?;
            match checks::run(&rig)? && kernels {
                true => Ok(()),
                false => bail!("something differs"),
            }
        }
        Command::Bridge => bridge::check(rig.backend(), rig.device()),
    }
}
