//! The suites of `kvpack bench` that have rows of their own.

use super::html::Html;
use super::{Subject, run_in_words};
use crate::SuiteReport;

/// Adds the tables of some runs of a suite, and what its rows are about.
pub fn sections(html: &mut Html, about: &str, subjects: &[Subject<'_, SuiteReport>]) {
    html.paragraph(about);
    for Subject { name, report } in subjects {
        let run = run_in_words(report.run.as_ref());
        html.paragraph(&format!("{name}: {}; {}. {run}", report.backend, report.sizes()));
        for table in report.tables() {
            let header: Vec<&str> = table.columns.iter().map(String::as_str).collect();
            html.table(&header, table.rows.into_iter().map(|row| (false, row)));
        }
    }
}
