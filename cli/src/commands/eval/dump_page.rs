//! The page of a report on a dump.

use std::path::Path;

use anyhow::Result;

use super::page::Page;
use super::plots::{LossAxis, Point, by_bits};
use super::report::{EvalReport, SummaryRow};
use crate::print;

const ERROR: LossAxis = LossAxis { name: "relative L2 error", smallest: 1e-7 };

/// Writes `path.json` and `path.html`, both or neither.
///
/// # Errors
/// When a file cannot be written.
pub fn write(report: &EvalReport, path: &Path) -> Result<()> {
    let mut page = Page::new(&report.file);
    let described =
        |what: &str, text: &Option<String>| text.as_ref().map_or(String::new(), |text| format!("{what}: {text}. "));
    page.paragraph(&format!(
        "{}{}Attention on {}, {} layers; the first {} and the last {} tokens in f16. Errors of the attention outputs against exact \
         attention over the dump.",
        described("Model", &report.model),
        described("Text", &report.text),
        report.backend,
        report.layers.len(),
        report.kept_first,
        report.kept_last
    ));
    let header = ["format", "mean error", "worst error", "calibrated", "bits per element", "bytes"].map(str::to_owned);
    page.table(&header, report.summary.iter().map(cells));
    let plain = |row: &SummaryRow| (row.bits_per_element, row.mean_error);
    page.plot(&by_bits("Error by bits per element", ERROR, &points(&report.summary, |row| Some(plain(row))))?);
    let calibrated = |row: &SummaryRow| Some((row.bits_per_element, row.mean_calibrated_error?));
    let calibrated = points(&report.summary, calibrated);
    if !calibrated.is_empty() {
        page.plot(&by_bits("Error with calibration, by bits per element", ERROR, &calibrated)?);
    }
    page.write(path, report)
}

fn points(rows: &[SummaryRow], at: impl Fn(&SummaryRow) -> Option<(f64, f64)>) -> Vec<Point> {
    let point = |row: &SummaryRow| at(row).map(|(bits, loss)| Point { name: row.format.clone(), bits, loss });
    rows.iter().filter_map(point).collect()
}

fn cells(row: &SummaryRow) -> Vec<String> {
    vec![
        row.format.clone(),
        print::percent(row.mean_error),
        print::percent(row.worst_error),
        row.mean_calibrated_error.map_or("-".into(), print::percent),
        format!("{:.3}", row.bits_per_element),
        row.bytes.to_string(),
    ]
}
