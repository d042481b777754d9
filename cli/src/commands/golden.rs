//! `kvpack golden`: do other people's outputs come out here too?

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;

use crate::backend::BackendArgs;
use crate::golden::{self, GoldenOutcome, GoldenResult};
use crate::outcome::Outcome;
use crate::print::{self, one_line, say};

/// Compare kvpack with the outputs of reference implementations.
///
/// Reads golden vectors, files with inputs and expected outputs, and runs them through the CPU kernels. Where there is
/// a GPU, ops that have a wgpu kernel run through that too. With --backend cuda, attention of prompts runs through
/// CUDA. Its other kernels are covered by `kvpack check`.
#[derive(clap::Args)]
pub struct GoldenArgs {
    /// Directory with `*.safetensors` files in the format of `tests/golden/README.md`.
    directory: PathBuf,
    #[command(flatten)]
    backend: BackendArgs,
}

/// Runs the command.
pub fn run(args: &GoldenArgs) -> Result<Outcome> {
    let results = golden::run_directory(&args.directory, &args.backend.open()?)?;
    print_implemented(&results)?;
    let unimplemented = print_unimplemented(&results)?;
    let implemented = results.len() - unimplemented;
    let agreeing = results.iter().filter(|result| matches!(result.outcome, GoldenOutcome::Agrees { .. })).count();
    say!("{agreeing} of {implemented} files agree, {unimplemented} are of ops that are not implemented")?;
    Ok(if agreeing == implemented { Outcome::Passed } else { Outcome::Failed })
}

fn print_implemented(results: &[GoldenResult]) -> Result<()> {
    let mut table = print::results(&["file", "kernels", "of tolerance", ""], 2);
    let mut reasons = Vec::new();
    for result in results {
        let (kernels, worst, verdict) = match &result.outcome {
            GoldenOutcome::Agrees { kernels, worst } => {
                let worst = if *worst == 0.0 { "exact".into() } else { print::percent(*worst) };
                (kernels.join("; "), worst, "ok")
            }
            GoldenOutcome::Differs { kernel, mismatch } => {
                reasons.push(format!("{}: {kernel}: {mismatch}", result.name));
                ((*kernel).into(), "-".into(), "DIFFERS")
            }
            GoldenOutcome::Broken { reason } => {
                reasons.push(format!("{}: {reason}", result.name));
                ("-".into(), "-".into(), "BROKEN")
            }
            GoldenOutcome::Unimplemented { .. } => continue,
        };
        table.add_row([one_line(&result.name).into_owned(), kernels, worst, verdict.into()]);
    }
    say!("{table}")?;
    for reason in reasons {
        say!("{}", one_line(&reason))?;
    }
    Ok(())
}

/// Lists the ops that are not implemented and returns how many files they have.
fn print_unimplemented(results: &[GoldenResult]) -> Result<usize> {
    let mut files: BTreeMap<&str, usize> = BTreeMap::new();
    for result in results {
        if let GoldenOutcome::Unimplemented { op } = &result.outcome {
            *files.entry(op).or_default() += 1;
        }
    }
    if !files.is_empty() {
        let list: Vec<String> = files.iter().map(|(op, count)| format!("{} ({count})", one_line(op))).collect();
        say!("not implemented: {}", list.join(", "))?;
    }
    Ok(files.values().sum())
}
