//! How tables, numbers and JSON are printed.

use std::io::Write;

use comfy_table::{CellAlignment, ContentArrangement, Table, TableComponent, presets};

/// A table of names and values, indented.
pub fn facts() -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table
}

/// A table with a header line; the first `texts` columns are left-aligned, the others right-aligned.
pub fn results(header: &[&str], texts: usize) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic).set_header(header);
    table.set_style(TableComponent::HeaderLines, '─').set_style(TableComponent::MiddleHeaderIntersections, '─');
    for column in table.column_iter_mut().skip(texts) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Bytes with a binary unit.
pub fn bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if value.fract() == 0.0 { 0 } else { 1 };
    format!("{value:.digits$} {}", units[unit])
}

/// Pretty JSON on standard output.
///
/// # Errors
/// When standard output is closed.
pub fn json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, value)?;
    writeln!(out)?;
    Ok(())
}

/// A fraction as a percentage with two or three significant digits.
pub fn percent(fraction: f64) -> String {
    let value = fraction * 100.0;
    match value {
        10.0.. => format!("{value:.1} %"),
        0.1.. => format!("{value:.2} %"),
        0.001.. => format!("{value:.4} %"),
        _ => format!("{value:.1e} %"),
    }
}

/// A rate with about three significant digits.
pub fn rate(value: f64) -> String {
    match value {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// A progress bar with a message, for standard error.
pub fn bar() -> indicatif::ProgressStyle {
    let plain = indicatif::ProgressStyle::default_bar();
    indicatif::ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg}").unwrap_or(plain)
}
