//! `kvpack check`: is this device right?

mod either;
mod matrix;
mod rows;

use std::ops::Range;
use std::str::FromStr;

use anyhow::{Result, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kvpack::Backend;
use kvpack_report::{CheckOutcome, ConformanceReport, Run};
use kvpack_weights::conformance as layers;

use self::either::{Backends, Check, Kind};
use self::matrix::print_matrix;
use self::rows::{RowTable, run_all};
use crate::backend::{BackendArgs, Chosen};
use crate::outcome::Outcome;
use crate::print::{self, note, say};
use crate::provenance;

/// Check that the kernels are right on this device; exit code 1 if any is not.
///
/// Attention and products with packed weights are compared with f64 over the stored data, everything else with the CPU
/// reference. By default the checks cover every kernel once. --all runs every check: all shapes, formats and edge cases,
/// which takes much longer. Rows are printed as they end. Several checks run at once, because most of their time is
/// spent in the compiler of the driver.
#[derive(clap::Args)]
pub struct CheckArgs {
    #[command(flatten)]
    backend: BackendArgs,
    /// Run every check instead of those that cover every kernel once.
    #[arg(long)]
    all: bool,
    /// The default.
    #[arg(long, hide = true, conflicts_with = "all")]
    quick: bool,
    /// Only the checks of this kind.
    #[arg(long, value_parser = kinds())]
    kind: Option<Kind>,
    /// Only the checks whose name contains this.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Run part N of M of these checks (1/4, 2/4, …), for parallel jobs.
    #[arg(long, value_name = "N/M", default_value = "1/1", hide_default_value = true)]
    part: Part,
    /// How many checks run at once [default: one per core, at most 16; 1 with --backend cuda].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: Option<u16>,
    /// Print which formats the backend serves and by which arithmetic, and check nothing.
    #[arg(long, conflicts_with_all = ["all", "quick", "kind", "filter", "part", "jobs"])]
    matrix: bool,
    /// Print JSON, which `kvpack compare` turns into a matrix of adapters and formats.
    #[arg(long, conflicts_with = "matrix")]
    json: bool,
}

/// The kinds by name, so that help lists them and a misspelt one gets a suggestion.
fn kinds() -> impl TypedValueParser<Value = Kind> {
    PossibleValuesParser::new(Kind::all().map(Kind::name)).try_map(|name| name.parse::<Kind>())
}

/// Most checks at once where nothing else is said: each holds stores on the device.
const MOST_JOBS: usize = 16;

/// One of several equal parts of a list.
#[derive(Clone, Copy)]
struct Part {
    /// From 1 on.
    number: usize,
    parts: usize,
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let part = text.split_once('/').and_then(|(number, parts)| {
            let (number, parts) = (number.parse().ok()?, parts.parse().ok()?);
            (1..=parts).contains(&number).then_some(Self { number, parts })
        });
        part.ok_or_else(|| "give a part and how many there are, as 1/4 for the first of four".into())
    }
}

impl Part {
    fn of(self, length: usize) -> Range<usize> {
        let edge = |number: usize| (length as u128 * number as u128 / self.parts as u128) as usize;
        edge(self.number - 1)..edge(self.number)
    }
}

/// Runs the command.
pub fn run(args: &CheckArgs) -> Result<Outcome> {
    let checks = args.checks()?;
    let backend = args.backend.open()?;
    let run = provenance::run(backend.driver(), None);
    let jobs = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_JOBS);
    match &backend {
        Chosen::Cpu(caches) => args.run_on(&Backends { caches, layers: kvpack_weights::Cpu }, checks, (jobs, run)),
        Chosen::Wgpu(caches) => {
            let layers = kvpack_weights::wgpu::Wgpu::new(caches.queue(), caches.kernels());
            args.run_on(&Backends { caches, layers }, checks, (jobs, run))
        }
        // One stream takes one check after the other.
        #[cfg(feature = "cuda")]
        Chosen::Cuda(caches) => {
            let layers = kvpack_weights::cuda::Cuda::new(caches.stream(), caches.kernels());
            args.run_on(&Backends { caches, layers }, checks, (1, run))
        }
    }
}

impl CheckArgs {
    fn checks(&self) -> Result<Vec<Check>> {
        let wanted = |check: &Check| {
            (check.is_quick() || self.all)
                && self.kind.is_none_or(|kind| check.kind() == kind)
                && self.filter.as_ref().is_none_or(|text| check.name().contains(text.as_str()))
        };
        let checks: Vec<Check> = either::all().into_iter().filter(wanted).collect();
        if checks.is_empty() {
            bail!(
                "no check matches --filter '{}'{}; {}",
                self.filter.as_deref().unwrap_or_default(),
                self.kind.map_or(String::new(), |kind| format!(" among those of --kind {}", kind.name())),
                if self.all { "`kvpack check --all` prints every name" } else { "--all searches every check" }
            );
        }
        let part = self.part.of(checks.len());
        if part.is_empty() {
            note!("part {} of {} has none of the {} checks", self.part.number, self.part.parts, checks.len());
        }
        Ok(checks[part].to_vec())
    }

    fn run_on<B: Backend + Sync, L: layers::Backend + Sync>(
        &self,
        on: &Backends<'_, B, L>,
        checks: Vec<Check>,
        (jobs, run): (usize, Run),
    ) -> Result<Outcome> {
        let jobs = self.jobs.map_or(jobs, usize::from);
        match (self.matrix, self.json) {
            (true, _) => print_matrix(on.caches),
            (_, true) => check_to_json(on, &checks, (jobs, run)),
            _ => print_checks(on, &checks, jobs),
        }
    }
}

fn check_to_json<B: Backend + Sync, L: layers::Backend + Sync>(
    on: &Backends<'_, B, L>,
    checks: &[Check],
    (jobs, run): (usize, Run),
) -> Result<Outcome> {
    let mut rows = Vec::with_capacity(checks.len());
    let done = run_all(on, checks, jobs, |row| {
        rows.push(row.reported());
        Ok(())
    });
    let (backend, planned) = (on.caches.name(), Some(checks.len()));
    let report = ConformanceReport { backend, run: Some(run), planned, rows };
    // What was checked is printed, whatever came after it.
    print::json(&report)?;
    done?;
    Ok(if report.count(CheckOutcome::Failed) == 0 { Outcome::Passed } else { Outcome::Failed })
}

fn print_checks<B: Backend + Sync, L: layers::Backend + Sync>(
    on: &Backends<'_, B, L>,
    checks: &[Check],
    jobs: usize,
) -> Result<Outcome> {
    say!("{} checks on {}", checks.len(), on.caches.name())?;
    print_kinds(checks)?;
    let table = RowTable::new(checks);
    table.heading()?;
    let (mut passed, mut failed, mut unsupported) = (0, 0, 0);
    let done = run_all(on, checks, jobs, |row| {
        *match row.outcome() {
            CheckOutcome::Passed => &mut passed,
            CheckOutcome::Unsupported => &mut unsupported,
            CheckOutcome::Failed => &mut failed,
        } += 1;
        table.row(&row)
    });
    let further = |count: usize, what: &str| if count > 0 { format!(", {count} {what}") } else { String::new() };
    let not_run = checks.len() - passed - failed - unsupported;
    let further = further(unsupported, "unsupported") + &further(not_run, "did not run");
    say!("\n{passed} passed, {failed} failed{further}")?;
    done?;
    Ok(if failed == 0 { Outcome::Passed } else { Outcome::Failed })
}

/// Says how many checks there are of each kind, and what they hold against what.
fn print_kinds(checks: &[Check]) -> Result<()> {
    let mut table = print::results(&["kind", "what is compared", "checks"], 2);
    for kind in Kind::all() {
        let count = checks.iter().filter(|check| check.kind() == kind).count();
        if count > 0 {
            table.add_row([kind.name().into(), kind.description().into(), count.to_string()]);
        }
    }
    Ok(say!("{table}")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_the_whole() {
        for (length, parts) in [(0, 3), (2, 3), (7, 3), (267, 48), (5, usize::MAX)] {
            let part = |number| Part { number, parts }.of(length);
            assert_eq!((part(1).start, part(parts).end), (0, length));
            for number in 1..parts.min(50) {
                assert_eq!(part(number).end, part(number + 1).start, "{number} of {parts}");
            }
        }
        for text in ["0/4", "5/4", "1", "1/0", "a/b", ""] {
            assert!(text.parse::<Part>().is_err(), "{text}");
        }
    }
}
