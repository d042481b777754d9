//! What the `kvpack` command is made of.
//!
//! It is a library only so that others can run its parts: the fuzz targets its readers, on bytes of their own, and the
//! hosts of the repository its decoder. Nothing here is stable.

mod adapters;
mod backend;
mod chunk_ranking;
mod commands;
mod compiled;
mod dump;
mod files;
mod golden;
mod invocation;
mod model;
mod outcome;
mod print;
mod provenance;
pub mod readers;

pub use model::{
    Activation, Attention, Chunk, Config, ExactAttention, Fused, Inputs, Linear, LocalLayers, Model, ModelError,
    PackedAttention, Product, RopePairs, Tokenizer, WeightTensors, Weights, softmax,
};
pub use provenance::run as this_run;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

/// Runs the command that the arguments of the process name.
pub fn main() -> ExitCode {
    run(invocation::Invocation::of_process()).into()
}

/// Runs the command for another program that holds it, and returns its exit code. `program` starts that program again
/// as the command: for `kvpack bench --ranks`. A process runs one command.
pub fn run_within(program: Vec<OsString>, arguments: Vec<OsString>) -> u8 {
    run(invocation::Invocation::of(program, arguments))
}

fn run(called: invocation::Invocation) -> u8 {
    outcome::exit_code(match commands::Command::try_parse_from(called.keep().words()) {
        Ok(command) => {
            let result = command.run();
            compiled::keep();
            result
        }
        // Help and versions go to standard output, wrong usage to standard error.
        Err(message) => match message.print() {
            Ok(()) => return message.exit_code() as u8,
            Err(error) => Err(print::StdoutError::from(error).into()),
        },
    })
}
