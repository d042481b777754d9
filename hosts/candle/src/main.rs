//! Models on candle's CPU device with kvpack's CPU backend.

use anyhow::{Result, bail};
use candle_core::{DType, Device};
use candle_host::{CpuSteps, Host, ServeArgs, StudyArgs, checks};
use clap::Parser;
use kvpack::cpu::Cpu;
use kvpack_cli::Model;

/// Whole models on candle's CPU device with kvpack as their attention and cache.
#[derive(Parser)]
enum Command {
    Serve(ServeArgs),
    Study(StudyArgs),
    /// Compares small models with what the command's CPU backend computes, and a queue with its requests alone.
    Check,
}

fn main() -> Result<()> {
    let backend = Cpu::new();
    match Command::parse() {
        Command::Serve(serve) => serve.run(&backend, Model::load(&serve.model)?, CpuSteps),
        Command::Study(study) => {
            let model = study.model(&Device::Cpu, DType::F32)?;
            study.run(&backend, Host::new(model, CpuSteps))
        }
        Command::Check => match checks::run(&backend, &mut |model| Ok(Host::new(model, CpuSteps)))? {
            true => Ok(()),
            false => bail!("something differs"),
        },
    }
}
