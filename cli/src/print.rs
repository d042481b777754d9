//! How texts, tables, numbers and JSON are printed.
//!
//! Everything for standard output goes through this file: `println!` panics where standard output is closed or its disk
//! full, and would hand the escape sequences that a hostile file brings to the terminal.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, Write};

use comfy_table::{CellAlignment, ContentArrangement, Table, TableComponent, presets};

/// Prints a line on standard output; its result must be used.
macro_rules! say {
    ($($text:tt)*) => {
        $crate::print::line(format_args!($($text)*))
    };
}

/// Prints a line on standard error, if anyone listens.
macro_rules! note {
    ($($text:tt)*) => {
        $crate::print::note_line(format_args!($($text)*))
    };
}

pub(crate) use {note, say};

/// Why nothing more can be printed.
#[derive(Debug, thiserror::Error)]
pub enum StdoutError {
    /// Whoever read standard output has seen enough.
    #[error("standard output is closed")]
    Closed,
    /// The operating system's reason.
    #[error("cannot write to standard output: {0}")]
    Failed(io::Error),
}

impl From<io::Error> for StdoutError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Failed(error),
        }
    }
}

/// Prints a line on standard output, with [`visible`] control characters.
///
/// # Errors
/// When standard output is closed or cannot be written.
pub fn line(text: fmt::Arguments<'_>) -> Result<(), StdoutError> {
    piece(&format!("{text}\n"))
}

/// Prints a piece of text on standard output at once, with [`visible`] control characters.
///
/// # Errors
/// When standard output is closed or cannot be written.
pub fn piece(text: &str) -> Result<(), StdoutError> {
    let mut out = io::stdout().lock();
    Ok(out.write_all(visible(text).as_bytes()).and_then(|()| out.flush())?)
}

/// Prints a line on standard error, with [`visible`] control characters; where that is closed, nobody misses it.
pub fn note_line(text: fmt::Arguments<'_>) {
    let _ = io::stderr().lock().write_all(visible(&format!("{text}\n")).as_bytes());
}

/// A text whose control characters, other than line ends and tabs, are written out: `\u{1b}` for an escape. So are
/// those that change the direction of writing.
fn visible(text: &str) -> Cow<'_, str> {
    escaped(text, |c| acts_on_terminals(c) && c != '\n' && c != '\t')
}

/// A text from a file, all its control characters written out, so that it stays the line that it is printed on.
pub fn one_line(text: &str) -> Cow<'_, str> {
    escaped(text, acts_on_terminals)
}

fn escaped(text: &str, hidden: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&hidden) {
        return Cow::Borrowed(text);
    }
    let mut visible = String::with_capacity(text.len());
    for c in text.chars() {
        if hidden(c) { visible.extend(c.escape_debug()) } else { visible.push(c) }
    }
    Cow::Owned(visible)
}

fn acts_on_terminals(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

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
/// When standard output is closed or cannot be written.
pub fn json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    // JSON writes control characters out by itself.
    Ok(say!("{}", serde_json::to_string_pretty(value)?)?)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_acts_on_the_terminal() {
        assert_eq!(visible("naïve\ttext — ☕\n"), "naïve\ttext — ☕\n");
        assert_eq!(visible("\u{1b}[2J\u{9b}1m\r\u{202e}"), "\\u{1b}[2J\\u{9b}1m\\r\\u{202e}");
        assert_eq!(one_line("a\nerror: b"), "a\\nerror: b");
    }
}
