//! What studies print and write.

use std::fs;
use std::path::Path;

use kvpack::backend::Device as _;
use kvpack::wgpu::Wgpu;
use kvpack_cli::this_run;
use kvpack_report::Run;
use serde::Serialize;

use crate::Result;

/// A file of rows.
#[derive(Serialize)]
struct Report<'a, T> {
    study: &'a str,
    run: Run,
    device: String,
    model: &'a str,
    rows: &'a [T],
}

/// This run. The program is not the command that its reader is taken from.
fn run() -> Run {
    let of_command = this_run(String::new(), None);
    let arguments = of_command.command.split_once(' ').map_or("", |(_, arguments)| arguments);
    Run { command: format!("burn-host {arguments}"), ..of_command }
}

/// Prints the lines before the table of a study.
pub fn heading(backend: &Wgpu, study: &str, model: &str) {
    let Run { commit, date, command, .. } = run();
    println!("\n{study}: {model}; {}; commit {}; {date}", backend.name(), commit.unwrap_or("unknown".into()));
    println!("{command}\n");
}

/// Writes the rows to a file, if there is one.
pub fn write<T: Serialize>(
    path: Option<&Path>,
    backend: &Wgpu,
    (study, model): (&str, &str),
    rows: &[T],
) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    let report = Report { study, run: run(), device: backend.name(), model, rows };
    let text = serde_json::to_string_pretty(&report)?;
    fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()).into())
}
