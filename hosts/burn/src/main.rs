//! Whole models on burn with kvpack as their attention and cache, on wgpu.
//!
//! Without a command the program checks itself: what is between burn and kvpack (`bridge`), and a small model
//! (`checks`). `decode` measures steps of decoding.

mod attention;
mod bridge;
mod checks;
mod decoder;
mod host;
mod own;
mod projections;
mod study;
mod trace;

use std::process::ExitCode;

use clap::Parser;
use kvpack::backend::Device as _;

type Error = Box<dyn std::error::Error + Send + Sync>;
type Result<T> = std::result::Result<T, Error>;

/// Whole models on burn with kvpack as their attention and cache.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Compares outputs, logits and texts with burn's own attention and the CPU backend. The default.
    Check,
    Decode(study::DecodeArgs),
}

fn main() -> Result<ExitCode> {
    let command = Arguments::parse().command.unwrap_or(Command::Check);
    if matches!(command, Command::Check) {
        trace::start();
    }
    let (device, backend) = attention::open()?;
    println!("{}", backend.name());
    let passed = match command {
        Command::Check => {
            let bridged = bridge::check(&device, &backend)?;
            let computed = checks::logits(&device, &backend)?;
            checks::queue(&device, &backend)? && bridged && computed
        }
        Command::Decode(study) => study.run(&device, &backend)?,
    };
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
