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

use std::error::Error;
use std::ffi::OsString;
use std::num::ParseIntError;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, CommandFactory, FromArgMatches};

/// Runs the command that the arguments of the process name.
pub fn main() -> ExitCode {
    run(invocation::Invocation::of_process()).into()
}

/// Runs the command for another program that holds it, and returns its exit code. `program` starts that program again
/// as the command: for `kvpack bench --ranks`. A process runs one command.
pub fn run_within(program: Vec<OsString>, arguments: Vec<OsString>) -> u8 {
    run(invocation::Invocation::of(program, arguments))
}

/// The command of these words. A negative number is the value of the option before it, whose message says what is
/// allowed; to clap it would be an option that does not exist.
fn parsed(words: impl Iterator<Item = OsString>) -> Result<commands::Command, clap::Error> {
    let takes_negative = |arg: Arg| {
        let takes_value = arg.get_action().takes_values();
        arg.allow_negative_numbers(takes_value)
    };
    let mut command = commands::Command::command().mut_subcommands(|of| of.mut_args(takes_negative));
    let matches = command.try_get_matches_from_mut(words).map_err(|mut error| {
        // The source says what is wrong with a number, and not what is allowed.
        if error.source().is_some_and(|source| source.is::<ParseIntError>()) {
            let tip = "give a whole number, such as 8".into();
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
        }
        error
    })?;
    commands::Command::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

fn run(called: invocation::Invocation) -> u8 {
    outcome::exit_code(match parsed(called.keep().words()) {
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
