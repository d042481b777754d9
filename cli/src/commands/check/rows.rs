//! The rows of a run: one for each check, in order.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use anyhow::{Result, bail};
use indicatif::ProgressBar;
use kvpack::Backend;
use kvpack_report::{CheckOutcome, CheckRow};
use kvpack_weights::conformance as layers;

use super::either::{Accuracy, Backends, Check, Found};
use crate::print::{self, say};

/// A check and what came of it.
pub struct Row {
    check: Check,
    outcome: kvpack::Result<Found>,
}

/// Runs all checks, `jobs` at once, and hands their rows on in order, each as soon as those before it are there. An
/// error of a check is its failure, but nothing more runs on a lost device.
///
/// # Errors
/// When a check loses the device, whose row is the last; errors of `each`.
pub fn run_all<B: Backend + Sync, L: layers::Backend + Sync>(
    on: &Backends<'_, B, L>,
    checks: &[Check],
    jobs: usize,
    each: impl FnMut(Row) -> Result<()>,
) -> Result<()> {
    let progress = ProgressBar::new(checks.len() as u64).with_style(print::bar());
    let next = AtomicUsize::new(0);
    let (sender, ended) = mpsc::channel();
    let done = std::thread::scope(|scope| {
        for sender in vec![sender; jobs.clamp(1, checks.len().max(1))] {
            let next = &next;
            scope.spawn(move || {
                while let Some((index, check)) = take(next, checks) {
                    let row = Row { check: check.clone(), outcome: pollster::block_on(check.run(on)) };
                    if sender.send((index, row)).is_err() {
                        break;
                    }
                }
            });
        }
        // No further check begins on a lost device, nor when nobody takes its row.
        hand_on(ended, &progress, each).inspect_err(|_| next.store(checks.len(), Ordering::Relaxed))
    });
    progress.finish_and_clear();
    done
}

/// Hands the rows on in order, each as soon as those before it are there. When the device is lost, the row of that
/// check follows those of all others that have ended.
fn hand_on(
    ended: impl IntoIterator<Item = (usize, Row)>,
    progress: &ProgressBar,
    mut each: impl FnMut(Row) -> Result<()>,
) -> Result<()> {
    let (mut early, mut handed_on) = (BTreeMap::new(), 0);
    for (index, row) in ended {
        if let Err(lost @ kvpack::Error::DeviceLost { .. }) = &row.outcome {
            let lost = format!("in check {}: {lost}", row.check.name());
            early.into_values().chain([row]).try_for_each(|row| progress.suspend(|| each(row)))?;
            bail!(lost);
        }
        progress.set_message(row.check.name().to_string());
        progress.inc(1);
        early.insert(index, row);
        while let Some(row) = early.remove(&handed_on) {
            handed_on += 1;
            progress.suspend(|| each(row))?;
        }
    }
    Ok(())
}

/// The next check that nobody has taken yet.
fn take<'a>(next: &AtomicUsize, checks: &'a [Check]) -> Option<(usize, &'a Check)> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    checks.get(index).map(|check| (index, check))
}

impl Row {
    pub fn outcome(&self) -> CheckOutcome {
        match &self.outcome {
            Ok(found) if found.reason.is_empty() => CheckOutcome::Passed,
            // The backend says that it has no kernel for the check.
            Err(kvpack::Error::Unsupported { .. }) => CheckOutcome::Unsupported,
            _ => CheckOutcome::Failed,
        }
    }

    /// What did not pass, in words.
    fn reason(&self) -> String {
        match &self.outcome {
            Ok(found) => found.reason.clone(),
            Err(error) => error.to_string(),
        }
    }

    fn accuracy(&self) -> Option<Accuracy> {
        self.outcome.as_ref().ok().and_then(|found| found.accuracy)
    }

    /// What it is about, and the kernel that was taken.
    fn subject(&self) -> String {
        let kernel = self.outcome.as_ref().ok().and_then(|found| found.kernel.as_ref());
        kernel.map_or_else(|| self.check.subject(), |kernel| format!("{}: {kernel}", self.check.subject()))
    }

    /// The row in JSON.
    pub fn reported(&self) -> CheckRow {
        let outcome = self.outcome();
        CheckRow {
            check: self.check.name().into(),
            of: self.check.kind().name().into(),
            formats: self.check.stored_formats(),
            outcome,
            nmse: self.accuracy().map(|accuracy| accuracy.nmse),
            reason: (outcome != CheckOutcome::Passed).then(|| self.reason()),
        }
    }
}

/// A table whose rows are printed one by one: its widths are known before.
pub struct RowTable {
    name: usize,
}

impl RowTable {
    pub fn new(checks: &[Check]) -> Self {
        let longest = checks.iter().map(|check| check.name().chars().count()).max();
        Self { name: longest.unwrap_or_default().max("check".len()) }
    }

    fn line(&self, [name, subject, nmse, worst, informative, limit, verdict]: [&str; 7]) -> Result<()> {
        let width = self.name;
        Ok(say!("{verdict:<11} {name:<width$} {nmse:>8} {worst:>10} {informative:>11} {limit:>6}  {subject}")?)
    }

    pub fn heading(&self) -> Result<()> {
        self.line(["check", "of", "NMSE", "worst head", "informative", "limit", ""])
    }

    pub fn row(&self, row: &Row) -> Result<()> {
        let accuracy = row.accuracy();
        let number = |part: fn(&Accuracy) -> Option<f64>| {
            accuracy.as_ref().and_then(part).map_or("-".into(), |value| format!("{value:.1e}"))
        };
        let verdict = match row.outcome() {
            CheckOutcome::Passed => "ok",
            CheckOutcome::Unsupported => "unsupported",
            CheckOutcome::Failed => "FAILED",
        };
        self.line([
            row.check.name(),
            &row.subject(),
            &number(|accuracy| Some(accuracy.nmse)),
            &number(|accuracy| accuracy.worst_head),
            &number(|accuracy| accuracy.informative),
            &accuracy.map_or("-".into(), |accuracy| format!("{:.0e}", accuracy.limit)),
            verdict,
        ])?;
        if row.outcome() != CheckOutcome::Passed {
            say!("{verdict} {}: {}", row.check.name(), row.reason())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::check::either;

    #[test]
    fn the_check_that_lost_the_device_is_the_last_row_and_failed() {
        let checks = either::all();
        let row = |at: usize| {
            let lost = kvpack::Error::DeviceLost { message: "a driver".into() };
            let passed = Found { kernel: None, accuracy: None, reason: String::new() };
            (at, Row { check: checks[at].clone(), outcome: if at == 2 { Err(lost) } else { Ok(passed) } })
        };
        let mut rows = Vec::new();
        let take = |row: Row| {
            rows.push(row.reported());
            Ok(())
        };
        // Check 1 had not ended when check 2 lost the device.
        let error = hand_on([3, 0, 2, 4].map(row), &ProgressBar::hidden(), take).unwrap_err();
        assert!(error.to_string().contains(checks[2].name()), "{error}");
        let found: Vec<(&str, CheckOutcome)> = rows.iter().map(|row| (row.check.as_str(), row.outcome)).collect();
        let passed = |at: usize| (checks[at].name(), CheckOutcome::Passed);
        assert_eq!(found, [passed(0), passed(3), (checks[2].name(), CheckOutcome::Failed)]);
    }
}
