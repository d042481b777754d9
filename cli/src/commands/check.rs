//! `kvpack check`: is this device right?

use std::ops::Range;
use std::str::FromStr;

use anyhow::{Result, bail};
use indicatif::ProgressBar;
use kvpack::Backend;
use kvpack::conformance::{self, Case, Report};

use crate::backend::{BackendArgs, Chosen};
use crate::outcome::Outcome;
use crate::print::{self, say};

/// Runs the conformance cases and compares with f64.
#[derive(clap::Args)]
pub struct CheckArgs {
    #[command(flatten)]
    backend: BackendArgs,
    /// Only the cases that cover every kernel once.
    #[arg(long)]
    quick: bool,
    /// Only the cases whose name contains this.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Only one of so many equal parts of these cases (1/4, 2/4, ...), for processes side by side.
    #[arg(long, value_name = "PART/PARTS", default_value = "1/1", hide_default_value = true)]
    part: Part,
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

/// A case and what came of it.
struct Row {
    case: Case,
    outcome: kvpack::Result<Report>,
}

/// Runs the command.
pub fn run(args: &CheckArgs) -> Result<Outcome> {
    let cases = args.cases()?;
    match args.backend.open()? {
        Chosen::Cpu(backend) => check(&backend, cases),
        Chosen::Wgpu(backend) => check(&backend, cases),
        #[cfg(feature = "cuda")]
        Chosen::Cuda(backend) => check(&backend, cases),
    }
}

impl CheckArgs {
    fn cases(&self) -> Result<Vec<Case>> {
        let wanted = |case: &Case| {
            (case.quick || !self.quick) && self.filter.as_ref().is_none_or(|text| case.name.contains(text.as_str()))
        };
        let cases: Vec<Case> = conformance::cases().into_iter().filter(wanted).collect();
        if cases.is_empty() {
            bail!(
                "no case matches --filter '{}'{}; run `kvpack check` without it to see the names",
                self.filter.as_deref().unwrap_or_default(),
                if self.quick { " among those of --quick" } else { "" }
            );
        }
        Ok(cases[self.part.of(cases.len())].to_vec())
    }
}

fn check<B: Backend>(backend: &B, cases: Vec<Case>) -> Result<Outcome> {
    say!("{} cases on {}", cases.len(), backend.name())?;
    let rows = run_all(backend, cases)?;
    print_rows(&rows)?;
    let unsupported = rows.iter().filter(|row| row.unsupported()).count();
    let failed = rows.iter().filter(|row| !row.passed()).count() - unsupported;
    let beside = if unsupported > 0 { format!(", {unsupported} unsupported") } else { String::new() };
    say!("{} passed, {failed} failed{beside}", rows.len() - failed - unsupported)?;
    Ok(if failed == 0 { Outcome::Passed } else { Outcome::Failed })
}

/// Runs all cases. An error of one is its failure, but nothing runs on a lost device.
fn run_all<B: Backend>(backend: &B, cases: Vec<Case>) -> Result<Vec<Row>> {
    let progress = ProgressBar::new(cases.len() as u64).with_style(print::bar());
    let mut rows = Vec::with_capacity(cases.len());
    for case in cases {
        progress.set_message(case.name.clone());
        let outcome = pollster::block_on(conformance::run_case(backend, &case));
        if let Err(lost @ kvpack::Error::DeviceLost { .. }) = outcome {
            bail!("in case {}: {lost}", case.name);
        }
        rows.push(Row { case, outcome });
        progress.inc(1);
    }
    progress.finish_and_clear();
    Ok(rows)
}

impl Row {
    fn passed(&self) -> bool {
        self.outcome.as_ref().is_ok_and(Report::passed)
    }

    /// True if the backend says that it has no kernel for the case.
    fn unsupported(&self) -> bool {
        matches!(self.outcome, Err(kvpack::Error::Unsupported { .. }))
    }
}

fn print_rows(rows: &[Row]) -> Result<()> {
    let mut table = print::results(&["case", "formats", "NMSE", "worst head", "informative", "limit", ""], 2);
    for row in rows {
        let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.1e}"));
        let report = row.outcome.as_ref().ok();
        let error = |part: fn(&Report) -> Option<f64>| number(report.and_then(part));
        table.add_row([
            row.case.name.clone(),
            row.case.formats(),
            error(|report| Some(report.error.nmse)),
            error(|report| Some(report.error.worst_head)),
            error(|report| report.error.informative),
            report.map_or("-".into(), |report| format!("{:.0e}", report.limits.nmse)),
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
        let reason = match &row.outcome {
            Ok(report) => report.reason(),
            Err(error) => error.to_string(),
        };
        say!("{} {}: {reason}", if row.unsupported() { "unsupported" } else { "FAILED" }, row.case.name)?;
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
