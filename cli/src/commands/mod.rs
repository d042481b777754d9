//! One file for each command.

mod bench;
mod check;
mod eval;
mod golden;
mod list;

use anyhow::Result;

use crate::outcome::Outcome;

/// Packed key-value caches: what this machine has, whether the kernels are right on it, how fast they are, and what a
/// format does to real keys and values.
///
/// Exit codes: 0 passed, 1 a check failed, 2 wrong usage, unreadable input or a device that cannot do it.
#[derive(clap::Parser)]
#[command(name = "kvpack", version)]
pub enum Command {
    /// List the GPU adapters with their drivers, features and limits.
    List(list::ListArgs),
    /// Run the conformance cases and compare with f64; exit code 1 if any fails.
    Check(check::CheckArgs),
    /// Time decode steps over packed caches, each checked against f64 first.
    Bench(bench::BenchArgs),
    /// Measure what each format does to the attention outputs of a dump of keys, values and queries.
    Eval(eval::EvalArgs),
    /// Run golden vectors and compare with the outputs that others got.
    Golden(golden::GoldenArgs),
}

impl Command {
    /// Runs the command.
    pub fn run(self) -> Result<Outcome> {
        match self {
            Self::List(args) => list::run(&args),
            Self::Check(args) => check::run(&args),
            Self::Bench(args) => bench::run(&args),
            Self::Eval(args) => eval::run(&args),
            Self::Golden(args) => golden::run(&args),
        }
    }
}
