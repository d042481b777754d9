//! One file for each command.

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
}

impl Command {
    /// Runs the command.
    pub fn run(self) -> Result<Outcome> {
        match self {
            Self::List(args) => list::run(&args),
        }
    }
}
