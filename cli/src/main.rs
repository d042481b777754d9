//! The `kvpack` command.

mod adapters;
mod backend;
mod commands;
mod dump;
mod golden;
mod model;
mod outcome;
mod print;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    outcome::exit_code(commands::Command::parse().run())
}
