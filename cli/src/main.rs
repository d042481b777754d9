//! The `kvpack` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvpack_cli::main()
}
