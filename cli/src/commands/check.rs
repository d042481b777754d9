//! `kvpack check`: is this device right?

use std::collections::BTreeMap;
use std::ops::Range;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use anyhow::{Result, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use indicatif::ProgressBar;
use kvpack::conformance::{self, Accuracy, Check, Kind, Report, Support};
use kvpack::{AttentionShape, Backend};
use kvpack_report::{CheckOutcome, CheckRow, ConformanceReport, Run, recipes};

use crate::backend::{BackendArgs, Chosen};
use crate::outcome::Outcome;
use crate::print::{self, say};
use crate::provenance;

/// Check that the kernels are right on this device; exit code 1 if any is not.
///
/// Attention is compared with f64 over the stored data, everything else with the CPU reference. By default the checks
/// cover every kernel once. --all runs every case: all shapes, formats and edge cases, which takes much longer. Rows
/// are printed as they end. Several checks run at once, because most of their time is spent in the compiler of the
/// driver.
#[derive(clap::Args)]
pub struct CheckArgs {
    #[command(flatten)]
    backend: BackendArgs,
    /// Run every case instead of those that cover every kernel once.
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
    PossibleValuesParser::new(Kind::ALL.map(Kind::name)).try_map(|name| name.parse::<Kind>())
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
    let jobs = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_JOBS);
    match &backend {
        Chosen::Cpu(backend) => args.run_on(backend, checks, (jobs, run)),
        Chosen::Wgpu(backend) => args.run_on(backend, checks, (jobs, run)),
        // One stream takes one check after the other.
        #[cfg(feature = "cuda")]
        Chosen::Cuda(backend) => args.run_on(backend, checks, (1, run)),
    }
}

impl CheckArgs {
    fn checks(&self) -> Result<Vec<Check>> {
        let wanted = |check: &Check| {
            (check.is_quick() || self.all)
                && self.kind.is_none_or(|kind| check.kind() == kind)
                && self.filter.as_ref().is_none_or(|text| check.name().contains(text.as_str()))
        };
        let checks: Vec<Check> = conformance::checks().into_iter().filter(wanted).collect();
        if checks.is_empty() {
            bail!(
                "no check matches --filter '{}'{}; {}",
                self.filter.as_deref().unwrap_or_default(),
                self.kind.map_or(String::new(), |kind| format!(" among those of --kind {kind}")),
                if self.all { "`kvpack check --all` prints every name" } else { "--all searches every case" }
            );
        }
        Ok(checks[self.part.of(checks.len())].to_vec())
    }

    fn run_on<B: Backend + Sync>(&self, backend: &B, checks: Vec<Check>, (jobs, run): (usize, Run)) -> Result<Outcome> {
        let jobs = self.jobs.map_or(jobs, usize::from);
        match (self.matrix, self.json) {
            (true, _) => print_matrix(backend),
            (_, true) => check_to_json(backend, &checks, (jobs, run)),
            _ => check(backend, &checks, jobs),
        }
    }
}

fn check_to_json<B: Backend + Sync>(backend: &B, checks: &[Check], (jobs, run): (usize, Run)) -> Result<Outcome> {
    let mut rows = Vec::with_capacity(checks.len());
    let done = run_all(backend, checks, jobs, |row| {
        rows.push(row.reported());
        Ok(())
    });
    let report = ConformanceReport { backend: backend.name(), run: Some(run), rows };
    // What was checked is printed, whatever came after it.
    print::json(&report)?;
    done?;
    Ok(if report.count(CheckOutcome::Failed) == 0 { Outcome::Passed } else { Outcome::Failed })
}

fn check<B: Backend + Sync>(backend: &B, checks: &[Check], jobs: usize) -> Result<Outcome> {
    say!("{} checks on {}", checks.len(), backend.name())?;
    print_kinds(checks)?;
    let table = RowTable::new(checks);
    table.heading()?;
    let (mut passed, mut failed, mut unsupported) = (0, 0, 0);
    let done = run_all(backend, checks, jobs, |row| {
        *match (row.passed(), row.unsupported()) {
            (true, _) => &mut passed,
            (_, true) => &mut unsupported,
            _ => &mut failed,
        } += 1;
        table.row(&row)
    });
    let further = if unsupported > 0 { format!(", {unsupported} unsupported") } else { String::new() };
    say!("\n{passed} passed, {failed} failed{further}")?;
    done?;
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

/// Runs all checks, `jobs` at once, and hands their rows on in order, each as soon as those before it are there. An
/// error of a check is its failure, but nothing more runs on a lost device.
fn run_all<B: Backend + Sync>(
    backend: &B,
    checks: &[Check],
    jobs: usize,
    mut each: impl FnMut(Row) -> Result<()>,
) -> Result<()> {
    let progress = ProgressBar::new(checks.len() as u64).with_style(print::bar());
    let next = AtomicUsize::new(0);
    let (sender, ended) = mpsc::channel();
    let done = std::thread::scope(|scope| {
        for sender in vec![sender; jobs.clamp(1, checks.len().max(1))] {
            let next = &next;
            scope.spawn(move || {
                while let Some((index, check)) = take(next, checks) {
                    let row = Row { check: check.clone(), outcome: pollster::block_on(check.run(backend)) };
                    if sender.send((index, row)).is_err() {
                        break;
                    }
                }
            });
        }
        let mut early = BTreeMap::new();
        let mut handed_on = 0;
        for (index, row) in ended {
            if let Err(lost @ kvpack::Error::DeviceLost { .. }) = &row.outcome {
                next.store(checks.len(), Ordering::Relaxed);
                bail!("in check {}: {lost}", row.check.name());
            }
            progress.set_message(row.check.name().to_string());
            progress.inc(1);
            early.insert(index, row);
            while let Some(row) = early.remove(&handed_on) {
                handed_on += 1;
                // No further check begins when nobody takes its row.
                progress.suspend(|| each(row)).inspect_err(|_| next.store(checks.len(), Ordering::Relaxed))?;
            }
        }
        Ok(())
    });
    progress.finish_and_clear();
    done
}

/// The next check that nobody has taken yet.
fn take<'a>(next: &AtomicUsize, checks: &'a [Check]) -> Option<(usize, &'a Check)> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    checks.get(index).map(|check| (index, check))
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

/// A table whose rows are printed one by one: its widths are known before.
struct RowTable {
    name: usize,
}

impl RowTable {
    fn new(checks: &[Check]) -> Self {
        let longest = checks.iter().map(|check| check.name().chars().count()).max();
        Self { name: longest.unwrap_or_default().max("check".len()) }
    }

    fn line(&self, [name, subject, nmse, worst, informative, limit, verdict]: [&str; 7]) -> Result<()> {
        let width = self.name;
        Ok(say!("{verdict:<11} {name:<width$} {nmse:>8} {worst:>10} {informative:>11} {limit:>6}  {subject}")?)
    }

    fn heading(&self) -> Result<()> {
        self.line(["check", "of", "NMSE", "worst head", "informative", "limit", ""])
    }

    fn row(&self, row: &Row) -> Result<()> {
        let accuracy = row.outcome.as_ref().ok().and_then(|report| report.accuracy);
        let number = |part: fn(&Accuracy) -> Option<f64>| {
            accuracy.as_ref().and_then(part).map_or("-".into(), |value| format!("{value:.1e}"))
        };
        let verdict = match (row.passed(), row.unsupported()) {
            (true, _) => "ok",
            (_, true) => "unsupported",
            _ => "FAILED",
        };
        self.line([
            row.check.name(),
            &subject(&row.check),
            &number(|accuracy| Some(accuracy.error.nmse)),
            &number(|accuracy| Some(accuracy.error.worst_head)),
            &number(|accuracy| accuracy.error.informative),
            &accuracy.map_or("-".into(), |accuracy| format!("{:.0e}", accuracy.limits.nmse)),
            verdict,
        ])?;
        if !row.passed() {
            say!("{verdict} {}: {}", row.check.name(), row.reason())?;
        }
        Ok(())
    }
}

/// What a check is about: the recipes whose formats it stores, as a user can paste them, then the formats or sizes.
fn subject(check: &Check) -> String {
    let subject = check.subject();
    let Ok(shape) = AttentionShape::new(32, 8, 128) else { return subject };
    let mut named: Vec<String> = Vec::new();
    for recipe in check.stored_formats().iter().filter_map(|format| recipes::of_format(format, &shape)) {
        if recipe != subject && !named.contains(&recipe) {
            named.push(recipe);
        }
    }
    if named.is_empty() { subject } else { format!("{}: {subject}", named.join(" + ")) }
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
