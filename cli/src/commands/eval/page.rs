//! The files of a report: JSON, and a self-contained page.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

/// A page of HTML that needs no other file.
pub struct Page {
    html: String,
}

impl Page {
    /// A page that begins with a headline.
    pub fn new(headline: &str) -> Self {
        let head = concat!(
            "<!doctype html><meta charset=utf-8><title>kvpack eval</title><style>",
            "body{font:15px sans-serif;margin:2em auto;max-width:64em;padding:0 1em}",
            "table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}",
            "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}</style>"
        );
        Self { html: format!("{head}<h1>{}</h1>", escaped(headline)) }
    }

    /// Adds a paragraph.
    pub fn paragraph(&mut self, text: &str) {
        self.html += &format!("<p>{}</p>", escaped(text));
    }

    /// Adds a table.
    pub fn table(&mut self, header: &[String], rows: impl Iterator<Item = Vec<String>>) {
        self.html += "<table>";
        self.row("th", header);
        rows.for_each(|row| self.row("td", &row));
        self.html += "</table>";
    }

    fn row(&mut self, cell: &str, texts: &[String]) {
        let cells: String = texts.iter().map(|text| format!("<{cell}>{}", escaped(text))).collect();
        self.html += &format!("<tr>{cells}</tr>");
    }

    /// Adds a plot.
    pub fn plot(&mut self, svg: &str) {
        self.html += svg;
    }

    /// Writes `path.html`, and `path.json` of the report, each whole or not at all.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write(&self, path: &Path, report: &impl Serialize) -> Result<()> {
        replace(&path.with_extension("json"), &serde_json::to_string_pretty(report)?)?;
        replace(&path.with_extension("html"), &self.html)
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn replace(path: &Path, content: &str) -> Result<()> {
    let temporary = path.with_extension("tmp");
    let written = std::fs::write(&temporary, content).and_then(|()| std::fs::rename(&temporary, path));
    written.with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_escaped_and_both_files_written() {
        let mut page = Page::new("a < b");
        page.paragraph("c & d");
        page.table(&["e>".into()], [vec!["1".into()]].into_iter());
        let directory = std::env::temp_dir().join(format!("kvpack-page-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("report");
        page.write(&path, &[1, 2]).unwrap();
        let html = std::fs::read_to_string(path.with_extension("html")).unwrap();
        assert!(html.contains("<h1>a &lt; b</h1><p>c &amp; d</p><table><tr><th>e&gt;</tr><tr><td>1</tr>"), "{html}");
        assert_eq!(std::fs::read_to_string(path.with_extension("json")).unwrap(), "[\n  1,\n  2\n]");
        std::fs::remove_dir_all(directory).unwrap();
    }
}
