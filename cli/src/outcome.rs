//! How a command ends.

use std::process::ExitCode;

/// How a command that could run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything is as it should be: exit code 0.
    Passed,
    /// A check failed: exit code 1.
    Failed,
}

/// The exit code of a command; an error is printed on standard error and gives exit code 2.
pub fn exit_code(result: anyhow::Result<Outcome>) -> ExitCode {
    match result {
        Ok(Outcome::Passed) => ExitCode::SUCCESS,
        Ok(Outcome::Failed) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}
