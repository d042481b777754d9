//! Whole models on burn with kvpack as their attention and cache, on wgpu.
//!
//! The program checks itself: what is between burn and kvpack (`bridge`), and a small model
//! (`checks`).

mod attention;
mod bridge;
mod checks;
mod decoder;
mod host;
mod projections;
mod trace;

use std::process::ExitCode;

use kvpack::backend::Device as _;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Result<ExitCode> {
    trace::start();
    let (device, backend) = attention::open()?;
    println!("{}", backend.name());
    let mut passed = bridge::check(&device, &backend)?;
    passed &= checks::logits(&device, &backend)?;
    passed &= checks::queue(&device, &backend)?;
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
