//! What an evaluation of documents found, as a table.

use kvpack_report::documents::{COLUMNS, LEGEND};
use kvpack_report::{DocumentsReport, DocumentsRow};

use crate::print::{self, one_line, say};

/// Prints the report as a table.
pub fn print(report: &DocumentsReport) -> anyhow::Result<()> {
    say!(
        "{} answers questions about {} documents of {} tokens from {} on {}",
        one_line(&report.model),
        report.documents,
        report.document_tokens,
        one_line(&report.text),
        report.backend
    )?;
    let mut table = print::results(&COLUMNS, 1);
    table.add_rows(report.rows.iter().map(DocumentsRow::cells));
    say!("{table}\n")?;
    LEGEND.iter().try_for_each(|line| say!("{line}"))?;
    report.contributions().map_or(Ok(()), |line| say!("{line}"))?;
    Ok(())
}
