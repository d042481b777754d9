//! What is printed and written of timed steps. The files of a report and the table for people grow row by row: a run
//! that is interrupted loses nothing. Other programs read CSV and Markdown, whose rows are printed once they are final.

use std::path::Path;

use anyhow::Result;
use kvpack_report::page::of_bench;
use kvpack_report::{BenchReport, BenchRow, Figures, RowOutcome, ShapeReport};
use serde::Serialize;

use super::UNSTEADY_PERCENT;
use super::run::Watch;
use crate::commands::eval::page;
use crate::print::{self, note, say};

/// How rows are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// A table for people for each shape.
    Table,
    /// One table of comma-separated values.
    Csv,
    /// One table of Markdown.
    Markdown,
    /// The whole report at the end.
    Json,
}

impl Style {
    /// Prints a suite's report: what was measured, whatever came after it.
    pub fn print<T: Serialize>(self, report: &T, tables: impl FnOnce(&T) -> Result<()>) -> Result<()> {
        if self == Self::Json { print::json(report) } else { tables(report) }
    }
}

/// Prints rows.
pub struct Output<'a> {
    style: Style,
    /// Files of the report, rewritten after every row.
    files: Option<&'a Path>,
    /// Characters of the longest name of a row.
    name_width: usize,
    /// Shapes whose heading is printed, and those that have ended.
    begun: usize,
    ended: usize,
    /// The lines of the rows of the shape that has begun last, as they were printed.
    lines: Vec<String>,
}

impl<'a> Output<'a> {
    /// Prints rows whose names have at most `name_width` characters.
    pub const fn new(style: Style, files: Option<&'a Path>, name_width: usize) -> Self {
        Self { style, files, name_width, begun: 0, ended: 0, lines: Vec::new() }
    }

    fn write(&self, report: &BenchReport) -> Result<()> {
        self.files.map_or(Ok(()), |path| page::write(path, report, &of_bench(report)))
    }

    fn heading(&self, report: &BenchReport, shape: &ShapeReport) -> Result<()> {
        let first = report.shapes.len() == 1;
        match self.style {
            Style::Json => {}
            Style::Csv if first => say!("{}", CSV.join(","))?,
            Style::Markdown if first => {
                say!("| {} |", MARKDOWN.join(" | "))?;
                say!("| --- | --- | ---: | --- |{}", " ---: |".repeat(MARKDOWN.len() - 4))?;
            }
            Style::Csv | Style::Markdown => {}
            Style::Table => {
                if first {
                    say!("{}", report.backend)?;
                    if !report.not_default.is_empty() {
                        say!("not the default: {}", report.not_default.join(", "))?;
                    }
                }
                say!("\n{}: {}", shape.shape, shape.described())?;
                if let Some(plain) = shape.plain_f32_us {
                    say!("plain f32 attention with the same threads: {plain:.1} µs")?;
                }
                say!("{}", self.table_line(&TABLE.map(str::to_owned), shape.plain_f32_us.is_some()))?;
            }
        }
        Ok(())
    }

    fn table_line(&self, cells: &[String; TABLE.len()], plain: bool) -> String {
        let [name, us, spread, samples, f16, rate, read, bytes, nmse, launches, plain_f32, format] = cells;
        let plain_f32 = if plain { format!(" {plain_f32:>8}") } else { String::new() };
        let width = self.name_width.max(name.chars().count());
        format!(
            "{name:<width$} {us:>10} {spread:>7} {samples:>5} {f16:>6} {rate:>7} {read:>6} {bytes:>9} {nmse:>6} \
             {launches:>8}{plain_f32}  {format}"
        )
        .trim_end()
        .to_owned()
    }

    fn line(&self, shape: &ShapeReport, row: &BenchRow) -> String {
        match self.style {
            Style::Json => String::new(),
            Style::Csv => csv(shape, row).map(|cell| quoted(&cell)).join(","),
            Style::Markdown => format!("| {} |", markdown(shape, row).map(|cell| cell.replace('|', "\\|")).join(" | ")),
            Style::Table => self.table_line(&table(row), shape.plain_f32_us.is_some()),
        }
    }

    /// Prints the heading of the last shape and its rows, as far as they are not there yet.
    fn print_rows(&mut self, report: &BenchReport, shape: &ShapeReport) -> Result<()> {
        if self.begun < report.shapes.len() {
            self.begun = report.shapes.len();
            self.lines.clear();
            self.heading(report, shape)?;
        }
        for row in shape.rows.iter().skip(self.lines.len()) {
            self.lines.push(self.line(shape, row));
            if let (Some(line), true) = (self.lines.last(), self.style != Style::Json) {
                say!("{line}")?;
            }
            if self.style == Style::Table {
                remark(row)?;
            }
        }
        Ok(())
    }

    /// Prints the rows of a table again that the last reading of the bandwidth has changed, and a shape's last lines.
    fn print_end(&self, shape: &ShapeReport) -> Result<()> {
        let lines: Vec<String> = shape.rows.iter().map(|row| self.line(shape, row)).collect();
        let changed = changed(&self.lines, &lines);
        if !changed.is_empty() {
            say!("by the last reading of the bandwidth, these rows are:")?;
            changed.into_iter().try_for_each(|line| say!("{line}"))?;
        }
        print_sums(shape)?;
        match shape.read_gigabytes_per_second {
            Some(read) => say!("read bandwidth, measured before and after the rows: {} GB/s", print::rate(read))?,
            None if shape.rows.iter().any(|row| row.outcome.figures().is_some()) => {
                say!("the read bandwidth is not known: no two readings of it agree; close other programs")?;
            }
            None => {}
        }
        Ok(())
    }
}

/// The lines that are no longer what was printed.
fn changed<'a>(printed: &[String], lines: &'a [String]) -> Vec<&'a str> {
    let pairs = printed.iter().zip(lines).filter(|(printed, line)| printed != line);
    pairs.map(|(_, line)| line.as_str()).collect()
}

impl Watch for Output<'_> {
    fn row(&mut self, report: &BenchReport) -> Result<()> {
        let Some(shape) = report.shapes.last() else { return Ok(()) };
        if self.style == Style::Table {
            self.print_rows(report, shape)?;
        }
        self.write(report)
    }

    fn shape(&mut self, report: &BenchReport) -> Result<()> {
        let Some(shape) = report.shapes.last().filter(|_| self.ended < report.shapes.len()) else { return Ok(()) };
        self.ended = report.shapes.len();
        self.print_rows(report, shape)?;
        if self.style == Style::Table {
            self.print_end(shape)?;
        }
        // What only the last reading of the bandwidth shows.
        for row in &shape.rows {
            if let RowOutcome::Discarded { reason, .. } = &row.outcome
                && self.style != Style::Json
            {
                note!("discarded {}, {}: {reason}", shape.shape, row.name());
            }
        }
        self.write(report)
    }
}

/// What is wrong with a row, below it.
fn remark(row: &BenchRow) -> Result<()> {
    let name = row.name();
    match &row.outcome {
        RowOutcome::Timed(figures) if figures.guard_low_percent > UNSTEADY_PERCENT => {
            say!("{}", unsteady(name, figures))?;
        }
        RowOutcome::Timed(_) | RowOutcome::Discarded { .. } => {}
        RowOutcome::Wrong { reason } => say!("WRONG {name}: {reason}")?,
        RowOutcome::Skipped { reason } => say!("skipped {name}: {reason}")?,
    }
    Ok(())
}

/// The warning of a figure that the guard does not trust.
pub fn unsteady(name: &str, figures: &Figures) -> String {
    format!(
        "unsteady {name}: the device ran {:.0} % below its best before or after it; close other programs",
        figures.guard_low_percent
    )
}

/// Compares batches in several formats with their parts, each timed alone.
fn print_sums(shape: &ShapeReport) -> Result<()> {
    for row in shape.rows.iter().filter(|row| row.parts.len() > 1) {
        let alone = |part: &String| shape.rows.iter().find(|row| row.format == *part)?.outcome.figures();
        let parts: Option<f64> = row.parts.iter().map(|part| Some(alone(part)?.step_us)).sum();
        if let (Some(parts), Some(figures)) = (parts, row.outcome.figures()) {
            let percent = (figures.step_us / parts - 1.0) * 100.0;
            say!("{}: {:.1} µs; its parts alone {parts:.1} µs in all ({percent:+.1} %)", row.format, figures.step_us)?;
        }
    }
    Ok(())
}

const TABLE: [&str; 12] =
    ["recipe", "µs", "±", "n", "× f16", "GB/s", "% read", "MB", "NMSE", "launches", "× plain", "format"];

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".into(), |value| format!("{value:.digits$}"))
}

fn table(row: &BenchRow) -> [String; TABLE.len()] {
    let figures = row.outcome.figures();
    let of = |part: fn(&Figures) -> Option<f64>| figures.and_then(part);
    let format = if row.recipe.as_ref() == Some(&row.format) { String::new() } else { row.format.clone() };
    let named = row.recipe.is_some();
    [
        row.name().to_owned(),
        number(of(|figures| Some(figures.step_us)), 1),
        spread(figures),
        figures.and_then(|figures| figures.spread).map_or("-".into(), |spread| spread.samples.to_string()),
        number(of(|figures| figures.times_f16), 2),
        figures.map_or("-".into(), |figures| print::rate(figures.gigabytes_per_second)),
        number(of(|figures| figures.percent_of_read), 0),
        format!("{:.2}", row.bytes as f64 / 1e6),
        row.nmse.map_or("-".into(), |nmse| format!("{nmse:.0e}")),
        figures.filter(|f| !f.launches.is_empty()).map_or("-".into(), |figures| figures.launches.len().to_string()),
        number(of(|figures| figures.times_plain_f32), 2),
        if named { format } else { String::new() },
    ]
}

/// Half of the distance between the quartiles, in percent.
fn spread(figures: Option<&Figures>) -> String {
    let spread = figures.and_then(|figures| Some(figures.spread?.percent_of(figures.step_us)));
    spread.map_or("-".into(), |percent| format!("{percent:.1} %"))
}

const MARKDOWN: [&str; 12] =
    ["step", "recipe", "µs", "format", "±", "n", "× f16", "GB/s", "% read", "MB", "NMSE", "× plain f32"];

fn markdown(shape: &ShapeReport, row: &BenchRow) -> [String; MARKDOWN.len()] {
    let [name, us, spread, samples, f16, rate, read, bytes, nmse, _, plain, _] = table(row);
    let us = match &row.outcome {
        RowOutcome::Timed(_) => us,
        outcome => outcome.word().to_owned(),
    };
    [
        shape.shape.clone(),
        format!("`{name}`"),
        us,
        row.format.clone(),
        spread,
        samples,
        f16,
        rate,
        read,
        bytes,
        nmse,
        plain,
    ]
}

const CSV: [&str; 21] = [
    "shape",
    "sequences",
    "tokens",
    "query_heads",
    "kv_heads",
    "head_dim",
    "recipe",
    "format",
    "outcome",
    "step_us",
    "low_us",
    "high_us",
    "samples",
    "times_f16",
    "times_plain_f32",
    "gigabytes_per_second",
    "percent_of_read",
    "bytes",
    "nmse",
    "timer",
    "reason",
];

fn csv(shape: &ShapeReport, row: &BenchRow) -> [String; CSV.len()] {
    let figures = row.outcome.figures();
    let number = |value: Option<f64>| value.map_or(String::new(), |value| value.to_string());
    let of = |part: fn(&Figures) -> Option<f64>| number(figures.and_then(part));
    let spread = figures.and_then(|figures| figures.spread);
    [
        shape.shape.clone(),
        shape.sequences.to_string(),
        shape.tokens.to_string(),
        shape.query_heads.to_string(),
        shape.kv_heads.to_string(),
        shape.head_dim.to_string(),
        row.recipe.clone().unwrap_or_default(),
        row.format.clone(),
        row.outcome.word().to_owned(),
        of(|figures| Some(figures.step_us)),
        number(spread.map(|spread| spread.low_us)),
        number(spread.map(|spread| spread.high_us)),
        spread.map_or(String::new(), |spread| spread.samples.to_string()),
        of(|figures| figures.times_f16),
        of(|figures| figures.times_plain_f32),
        of(|figures| Some(figures.gigabytes_per_second)),
        of(|figures| figures.percent_of_read),
        row.bytes.to_string(),
        number(row.nmse),
        figures.map_or(String::new(), |figures| figures.timer.clone()),
        row.outcome.reason().unwrap_or_default().to_owned(),
    ]
}

/// A cell of comma-separated values.
fn quoted(cell: &str) -> String {
    match cell.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", cell.replace('"', "\"\"")),
        false => cell.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rows_that_changed_are_printed_again() {
        let lines = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        let printed = lines(&["f16 10 98", "4-bit 3 90"]);
        assert_eq!(changed(&printed, &lines(&["f16 - -", "4-bit 3 90"])), ["f16 - -"]);
        assert_eq!(changed(&printed, &printed), Vec::<&str>::new());
    }

    #[test]
    fn cells_keep_their_commas() {
        assert_eq!(quoted("4-bit per token"), "4-bit per token");
        assert_eq!(quoted("K 4-bit, V \"2\""), "\"K 4-bit, V \"\"2\"\"\"");
    }
}
