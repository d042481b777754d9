//! Whole models on burn with kvpack as their attention and cache, on wgpu.
//!
//! Without arguments the program checks itself: what is between burn and kvpack (`bridge`), and a small model
//! (`checks`). With the feature `gguf`, `decode` times steps of a GGUF file's model.

mod attention;
mod bridge;
mod checks;
#[cfg(feature = "gguf")]
mod decode;
mod decoder;
#[cfg(feature = "gguf")]
mod gguf;
mod host;
#[cfg(feature = "gguf")]
mod own;
mod projections;
#[cfg(feature = "gguf")]
mod report;
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
    #[cfg(feature = "gguf")]
    Decode(decode::DecodeArgs),
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
        #[cfg(feature = "gguf")]
        Command::Decode(decode) => decode.run(&device, &backend)?,
    };
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
