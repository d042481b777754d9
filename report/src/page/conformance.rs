//! Which formats which adapter computes right.

use std::collections::BTreeMap;

use super::html::Html;
use super::{Subject, run_in_words};
use crate::family::{Family, Named};
use crate::{CheckOutcome, CheckRow, ConformanceReport};

/// Adds what there is to say about some runs of the checks.
pub fn sections(html: &mut Html, subjects: &[Subject<'_, ConformanceReport>]) {
    html.verdict(&subjects.iter().map(verdict).collect::<Vec<_>>());
    for Subject { name, report } in subjects {
        html.paragraph(&format!("{name}: {}. {}", report.backend, run_in_words(report.run.as_ref())));
    }
    let mut header = vec!["checks that passed"];
    header.extend(subjects.iter().map(|subject| subject.name));
    let matrices: Vec<BTreeMap<Line, Vec<&CheckRow>>> = subjects.iter().map(|subject| matrix(subject.report)).collect();
    let mut lines: Vec<&Line> = matrices.iter().flat_map(BTreeMap::keys).collect();
    lines.sort();
    lines.dedup();
    let rows = lines.into_iter().map(|line| {
        let cells = matrices.iter().map(|matrix| matrix.get(line).map_or("–".into(), |rows| cell(rows)));
        (false, std::iter::once(line.name()).chain(cells).collect())
    });
    html.table(&header, rows);
    html.paragraph(
        "A check of a format stores keys and values. It compares the stored data with the CPU reference bit for bit, and \
         attention with f64. linear and dequantize are products with packed weights, compared with f64, and the weights \
         themselves. In brackets: the largest normalised mean square error. –: not checked.",
    );
    for Subject { name, report } in subjects {
        for row in report.rows.iter().filter(|row| row.outcome == CheckOutcome::Failed) {
            html.paragraph(&format!("{name}, {}: {}", row.check, row.reason.as_deref().unwrap_or("failed")));
        }
    }
}

/// How many checks passed, over all devices.
pub fn sentence(subjects: &[Subject<'_, ConformanceReport>]) -> Option<String> {
    let count = |outcome| subjects.iter().map(|subject| subject.report.count(outcome)).sum::<usize>();
    let (passed, failed) = (count(CheckOutcome::Passed), count(CheckOutcome::Failed));
    let not_run = subjects.iter().map(|subject| subject.report.not_run()).sum::<usize>();
    let sentence = match (passed + failed, failed) {
        (0, _) if not_run == 0 => return None,
        (0, _) => String::new(),
        (all, 0) if not_run == 0 => format!("All {all} checks passed."),
        (all, 0) => format!("{all} checks passed."),
        (all, failed) => format!("{failed} of {all} checks FAILED."),
    };
    let ended = if not_run > 0 { format!("{not_run} checks did NOT RUN.") } else { String::new() };
    Some(format!("{sentence} {ended}").trim().to_owned())
}

fn verdict(Subject { name, report }: &Subject<'_, ConformanceReport>) -> String {
    let [passed, failed, unsupported] =
        [CheckOutcome::Passed, CheckOutcome::Failed, CheckOutcome::Unsupported].map(|outcome| report.count(outcome));
    let right = if failed == 0 { "is right in all that was checked" } else { "is WRONG" };
    let beside = if unsupported > 0 { format!(", {unsupported} are not served and say so") } else { String::new() };
    let ended = match (report.not_run(), report.planned) {
        (not_run @ 1.., Some(planned)) => format!(" The run ended early: {not_run} of {planned} checks did not run."),
        _ => String::new(),
    };
    format!("{name} {right}: {passed} checks passed, {failed} failed{beside}.{ended}")
}

/// What a line of the matrix is about, in the order of the lines.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Line {
    /// A family of formats, the widest code first.
    Format(Family, std::cmp::Reverse<u32>),
    /// Several formats in one step.
    Mixed,
    /// Kernels that store nothing packed.
    Kernels(String),
}

impl Line {
    fn of(row: &CheckRow) -> Self {
        let packed: Vec<Option<Named>> =
            row.formats.iter().filter(|format| *format != "f16").map(|format| Named::format(format)).collect();
        match packed.as_slice() {
            [] if row.formats.is_empty() => Self::Kernels(row.of.clone()),
            [] => Self::Format(Family::F16, std::cmp::Reverse(16)),
            [Some(named)] => Self::Format(named.family, std::cmp::Reverse(named.width)),
            _ => Self::Mixed,
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Format(Family::F16, _) => "f16".into(),
            Self::Format(family, width) => format!("{}, {} bits", family.name(), width.0),
            Self::Mixed => "several formats in one cache".into(),
            Self::Kernels(kernels) => kernels.clone(),
        }
    }
}

fn matrix(report: &ConformanceReport) -> BTreeMap<Line, Vec<&CheckRow>> {
    let mut matrix: BTreeMap<Line, Vec<&CheckRow>> = BTreeMap::new();
    for row in &report.rows {
        matrix.entry(Line::of(row)).or_default().push(row);
    }
    matrix
}

/// `31 of 32 (2e-9)`, and what is wrong.
fn cell(rows: &[&CheckRow]) -> String {
    let count = |outcome| rows.iter().filter(|row| row.outcome == outcome).count();
    let (passed, failed) = (count(CheckOutcome::Passed), count(CheckOutcome::Failed));
    if passed + failed == 0 {
        return "not served".into();
    }
    let mark = if failed > 0 { "✗" } else { "✓" };
    let nmse = rows.iter().filter_map(|row| row.nmse).fold(None, |most: Option<f64>, nmse| {
        // A NaN is the worst there is.
        Some(most.map_or(nmse, |most| if nmse > most || nmse.is_nan() { nmse } else { most }))
    });
    let nmse = nmse.map_or(String::new(), |nmse| format!(" ({nmse:.0e})"));
    format!("{mark} {passed} of {}{nmse}", passed + failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(check: &str, formats: &[&str], outcome: CheckOutcome, nmse: Option<f64>) -> CheckRow {
        let formats = formats.iter().map(|&format| format.to_owned()).collect();
        let reason = (outcome == CheckOutcome::Failed).then(|| "off by 3".to_owned());
        CheckRow { check: check.into(), of: "attention".into(), formats, outcome, nmse, reason }
    }

    #[test]
    fn a_failure_shows_in_its_line() {
        let rows = vec![
            row("a", &["f16", "4-bit per channel"], CheckOutcome::Passed, Some(1e-9)),
            row("b", &["4-bit per channel"], CheckOutcome::Failed, Some(3e-2)),
            row("c", &["8-bit per token"], CheckOutcome::Unsupported, None),
            row("d", &["f16"], CheckOutcome::Passed, Some(1e-12)),
            row("e", &["8-bit per token", "4-bit per token"], CheckOutcome::Passed, None),
            row("f", &[], CheckOutcome::Passed, None),
        ];
        let report = ConformanceReport { backend: "Card".into(), run: None, planned: None, rows };
        let lines: Vec<(String, String)> =
            matrix(&report).iter().map(|(line, rows)| (line.name(), cell(rows))).collect();
        let lines: Vec<(&str, &str)> = lines.iter().map(|(line, cell)| (line.as_str(), cell.as_str())).collect();
        assert_eq!(
            lines,
            [
                ("f16", "✓ 1 of 1 (1e-12)"),
                ("per channel, 4 bits", "✗ 1 of 2 (3e-2)"),
                ("per token, 8 bits", "not served"),
                ("several formats in one cache", "✓ 1 of 1"),
                ("attention", "✓ 1 of 1"),
            ]
        );
        let ended = ConformanceReport { planned: Some(9), ..report.clone() };
        let ended = [Subject { name: "card", report: &ended }];
        let said = verdict(&ended[0]);
        assert!(said.ends_with("The run ended early: 3 of 9 checks did not run."), "{said}");
        assert_eq!(sentence(&ended).as_deref(), Some("1 of 5 checks FAILED. 3 checks did NOT RUN."));
        let mut html = Html::new("");
        sections(&mut html, &[Subject { name: "card", report: &report }]);
        let page = html.finish();
        for part in ["card is WRONG: 4 checks passed, 1 failed, 1 are not served", "card, b: off by 3", "<th>card</th>"]
        {
            assert!(page.contains(part), "{part}: {page}");
        }
    }
}
