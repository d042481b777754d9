//! Models on candle's CUDA device with kvpack as their attention and cache.

mod attention;
mod bridge;

use anyhow::{Result, bail};
use attention::CudaSteps;
use candle_core::DType;
use candle_host::{Host, ServeArgs, StudyArgs, checks};
use clap::Parser;
use kvpack_cli::Model;

/// Whole models on candle's CUDA device with kvpack as their attention and cache.
#[derive(Parser)]
enum Command {
    Serve(ServeArgs),
    Study(StudyArgs),
    /// Compares small models with what the command's CPU backend computes, and a queue with its requests alone.
    Check,
    /// Compares and times kvpack's attention over candle's tensors.
    Bridge,
}

fn main() -> Result<()> {
    let command = Command::parse();
    let (device, backend) = attention::open()?;
    let steps = |model: &Model, rows, dtype| {
        let of = (model.config.attention, model.config.layers);
        CudaSteps::new(&backend, &device, of, rows, dtype)
    };
    match command {
        Command::Serve(serve) => {
            let model = Model::load(&serve.model)?.moved(&device, DType::F16)?;
            let steps = steps(&model, serve.settings().rows, DType::F16)?;
            serve.run(&backend, model, steps)
        }
        Command::Study(study) => {
            let model = study.model(&device, DType::F16)?;
            let steps = steps(&model, study.rows(), DType::F16)?;
            study.run(&backend, Host::new(model, steps))
        }
        Command::Check => {
            let host = &mut |model: Model| {
                let model = model.moved(&device, DType::F32)?;
                let steps = steps(&model, checks::ROWS, DType::F32)?;
                Ok(Host::new(model, steps))
            };
            match checks::run(&backend, host)? {
                true => Ok(()),
                false => bail!("something differs"),
            }
        }
        Command::Bridge => bridge::check(&backend, &device),
    }
}
