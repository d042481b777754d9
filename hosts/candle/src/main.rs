//! Models on candle's CPU device with kvpack's CPU backend.

use anyhow::Result;
use candle_host::{CpuSteps, ServeArgs};
use clap::Parser;
use kvpack::cpu::Cpu;
use kvpack_cli::Model;

/// Whole models on candle's CPU device with kvpack as their attention and cache.
#[derive(Parser)]
enum Command {
    Serve(ServeArgs),
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Serve(serve) => serve.run(&Cpu::new(), Model::load(&serve.model)?, CpuSteps),
    }
}
