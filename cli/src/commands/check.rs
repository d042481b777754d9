//! `kvpack check`: is this device right?

use std::ops::Range;
use std::str::FromStr;

use anyhow::{Result, bail};
use indicatif::ProgressBar;
use kvpack::conformance::{self, Accuracy, Check, Kind, Report, Support};
use kvpack::{AttentionShape, Backend};
use kvpack_report::{CheckOutcome, CheckRow, ConformanceReport, Run};

use crate::backend::{BackendArgs, Chosen};
use crate::outcome::Outcome;
use crate::print::{self, say};
use crate::provenance;

/// Runs the conformance checks: attention against f64, everything else against the CPU reference.
#[derive(clap::Args)]
pub struct CheckArgs {
    #[command(flatten)]
    backend: BackendArgs,
    /// Only the checks that cover every kernel once.
    #[arg(long)]
    quick: bool,
    /// Only the checks of this kind: attention, states, packing, statistics, top-k, eviction, chunks.
    #[arg(long)]
    kind: Option<Kind>,
    /// Only the checks whose name contains this.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Only one of so many equal parts of these checks (1/4, 2/4, ...), for processes side by side.
    #[arg(long, value_name = "PART/PARTS", default_value = "1/1", hide_default_value = true)]
    part: Part,
    /// Print which formats the backend serves and by which arithmetic, and check nothing.
    #[arg(long, conflicts_with_all = ["quick", "kind", "filter", "part"])]
    matrix: bool,
    /// Print JSON, which `kvpack compare` makes a matrix of adapters and formats of.
    #[arg(long, conflicts_with = "matrix")]
    json: bool,
}

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

/// A check and what came of it.
struct Row {
    check: Check,
    outcome: kvpack::Result<Report>,
}

/// Runs the command.
pub fn run(args: &CheckArgs) -> Result<Outcome> {
    let checks = args.checks()?;
    let backend = args.backend.open()?;
    let run = provenance::run(backend.driver(), None);
    match &backend {
        Chosen::Cpu(backend) => args.run_on(backend, checks, run),
        Chosen::Wgpu(backend) => args.run_on(backend, checks, run),
        #[cfg(feature = "cuda")]
        Chosen::Cuda(backend) => args.run_on(backend, checks, run),
    }
}

impl CheckArgs {
    fn checks(&self) -> Result<Vec<Check>> {
        let wanted = |check: &Check| {
            (check.is_quick() || !self.quick)
                && self.kind.is_none_or(|kind| check.kind() == kind)
                && self.filter.as_ref().is_none_or(|text| check.name().contains(text.as_str()))
        };
        let checks: Vec<Check> = conformance::checks().into_iter().filter(wanted).collect();
        if checks.is_empty() {
            bail!(
                "no check matches --filter '{}'{}{}; run `kvpack check` without it to see the names",
                self.filter.as_deref().unwrap_or_default(),
                self.kind.map_or(String::new(), |kind| format!(" among those of --kind {kind}")),
                if self.quick { " among those of --quick" } else { "" }
            );
        }
        Ok(checks[self.part.of(checks.len())].to_vec())
    }

    fn run_on<B: Backend>(&self, backend: &B, checks: Vec<Check>, run: Run) -> Result<Outcome> {
        match (self.matrix, self.json) {
            (true, _) => print_matrix(backend),
            (_, true) => check_to_json(backend, checks, run),
            _ => check(backend, checks),
        }
    }
}

fn check_to_json<B: Backend>(backend: &B, checks: Vec<Check>, run: Run) -> Result<Outcome> {
    let rows = run_all(backend, checks)?.iter().map(Row::reported).collect();
    let report = ConformanceReport { backend: backend.name(), run: Some(run), rows };
    print::json(&report)?;
    Ok(if report.count(CheckOutcome::Failed) == 0 { Outcome::Passed } else { Outcome::Failed })
}

fn check<B: Backend>(backend: &B, checks: Vec<Check>) -> Result<Outcome> {
    say!("{} checks on {}", checks.len(), backend.name())?;
    print_kinds(&checks)?;
    let rows = run_all(backend, checks)?;
    print_rows(&rows)?;
    let unsupported = rows.iter().filter(|row| row.unsupported()).count();
    let failed = rows.iter().filter(|row| !row.passed()).count() - unsupported;
    let beside = if unsupported > 0 { format!(", {unsupported} unsupported") } else { String::new() };
    say!("{} passed, {failed} failed{beside}", rows.len() - failed - unsupported)?;
    Ok(if failed == 0 { Outcome::Passed } else { Outcome::Failed })
}

/// Says how many checks there are of each kind, and what they hold against what.
fn print_kinds(checks: &[Check]) -> Result<()> {
    let mut table = print::results(&["kind", "what is compared", "checks"], 2);
    for kind in Kind::ALL {
        let count = checks.iter().filter(|check| check.kind() == kind).count();
        if count > 0 {
            table.add_row([kind.to_string(), kind.description().into(), count.to_string()]);
        }
    }
    Ok(say!("{table}")?)
}

/// Query heads per KV head of the columns of the matrix.
const GROUPS: [usize; 3] = [1, 4, 8];

fn print_matrix<B: Backend>(backend: &B) -> Result<Outcome> {
    say!("{}: keys and values of head dimension 128 are multiplied as", backend.name())?;
    let of_groups = GROUPS.map(|group| {
        let shape = AttentionShape::new(group, 1, 128)?;
        conformance::support(backend, &shape)
    });
    let of_groups = of_groups.into_iter().collect::<kvpack::Result<Vec<Vec<Support>>>>()?;
    let columns = GROUPS.map(|group| format!("{group} query head{} per KV head", if group == 1 { "" } else { "s" }));
    let headers: Vec<&str> =
        ["format", "single tokens"].into_iter().chain(columns.iter().map(String::as_str)).collect();
    let mut table = print::results(&headers, headers.len());
    for (index, row) in of_groups[0].iter().enumerate() {
        let tokens = if row.single_tokens { "packed" } else { "in f16 first" };
        let mut cells = vec![row.format.to_string(), tokens.into()];
        cells.extend(of_groups.iter().map(|rows| cell(&rows[index])));
        table.add_row(cells);
    }
    say!("{table}")?;
    say!(
        "Two kinds of arithmetic: keys, then values. Tensors of f32, f16 and bf16 are taken. An 8-bit query (q8) is an option \
         of the call. Contexts are long, and scores not calibrated."
    )?;
    Ok(Outcome::Passed)
}

/// The arithmetic with a 16-bit query, and with one of 8 bits where that is another.
fn cell(row: &Support) -> String {
    match &row.arithmetic {
        [Ok(of_16), Ok(of_8)] if of_16 == of_8 => of_16.to_string(),
        [Ok(of_16), Ok(of_8)] => format!("{of_16}; q8: {of_8}"),
        [Err(reason), _] | [_, Err(reason)] => format!("not served: {reason}"),
    }
}

/// Runs all checks. An error of one is its failure, but nothing runs on a lost device.
fn run_all<B: Backend>(backend: &B, checks: Vec<Check>) -> Result<Vec<Row>> {
    let progress = ProgressBar::new(checks.len() as u64).with_style(print::bar());
    let mut rows = Vec::with_capacity(checks.len());
    for check in checks {
        progress.set_message(check.name().to_string());
        let outcome = pollster::block_on(check.run(backend));
        if let Err(lost @ kvpack::Error::DeviceLost { .. }) = outcome {
            bail!("in check {}: {lost}", check.name());
        }
        rows.push(Row { check, outcome });
        progress.inc(1);
    }
    progress.finish_and_clear();
    Ok(rows)
}

impl Row {
    fn passed(&self) -> bool {
        self.outcome.as_ref().is_ok_and(Report::passed)
    }

    /// True if the backend says that it has no kernel for the check.
    fn unsupported(&self) -> bool {
        matches!(self.outcome, Err(kvpack::Error::Unsupported { .. }))
    }

    /// What did not pass, in words.
    fn reason(&self) -> String {
        match &self.outcome {
            Ok(report) => report.reason(),
            Err(error) => error.to_string(),
        }
    }

    fn reported(&self) -> CheckRow {
        let (passed, check) = (self.passed(), &self.check);
        CheckRow {
            check: check.name().into(),
            of: check.kind().to_string(),
            formats: check.stored_formats().iter().map(ToString::to_string).collect(),
            outcome: match (passed, self.unsupported()) {
                (true, _) => CheckOutcome::Passed,
                (_, true) => CheckOutcome::Unsupported,
                _ => CheckOutcome::Failed,
            },
            nmse: self.outcome.as_ref().ok().and_then(|report| report.accuracy).map(|accuracy| accuracy.error.nmse),
            reason: (!passed).then(|| self.reason()),
        }
    }
}

fn print_rows(rows: &[Row]) -> Result<()> {
    let columns = ["check", "of", "NMSE", "worst head", "informative", "limit", ""];
    let mut table = print::results(&columns, 2);
    for row in rows {
        let accuracy = row.outcome.as_ref().ok().and_then(|report| report.accuracy);
        let number = |part: fn(&Accuracy) -> Option<f64>| {
            accuracy.as_ref().and_then(part).map_or("-".into(), |value| format!("{value:.1e}"))
        };
        table.add_row([
            row.check.name().into(),
            row.check.subject(),
            number(|accuracy| Some(accuracy.error.nmse)),
            number(|accuracy| Some(accuracy.error.worst_head)),
            number(|accuracy| accuracy.error.informative),
            accuracy.map_or("-".into(), |accuracy| format!("{:.0e}", accuracy.limits.nmse)),
            match (row.passed(), row.unsupported()) {
                (true, _) => "ok",
                (_, true) => "unsupported",
                _ => "FAILED",
            }
            .into(),
        ]);
    }
    say!("{table}")?;
    for row in rows.iter().filter(|row| !row.passed()) {
        let what = if row.unsupported() { "unsupported" } else { "FAILED" };
        say!("{what} {}: {}", row.check.name(), row.reason())?;
    }
    Ok(())
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
