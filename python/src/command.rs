//! The command `kvpack`, which the module holds.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command with these arguments and returns its exit code. ``program`` starts it again, in another process.
#[pyfunction]
pub fn command(py: Python<'_>, program: Vec<OsString>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| kvpack_cli::run_within(program, arguments))
}
