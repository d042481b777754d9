//! The files of a report: JSON, and a self-contained page.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Serialize;

use crate::files::Replacement;

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

    /// Writes `path.html`, and `path.json` of the report: both, or neither where one of them cannot be written.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write(&self, path: &Path, report: &impl Serialize) -> Result<()> {
        let json = serde_json::to_string_pretty(report)?;
        let mut files = Files::new(path)?;
        files.json.write(json.as_bytes())?;
        files.html.write(self.html.as_bytes())?;
        files.commit()
    }
}

/// Both files, to be written.
pub struct Files {
    json: Replacement,
    html: Replacement,
}

impl Files {
    /// Begins to write `path.json` and `path.html`.
    ///
    /// # Errors
    /// When one of them cannot be written.
    pub fn new(path: &Path) -> Result<Self> {
        Ok(Self {
            json: Replacement::new(&with_ending(path, ".json"))?,
            html: Replacement::new(&with_ending(path, ".html"))?,
        })
    }

    fn commit(self) -> Result<()> {
        self.json.commit()?;
        self.html.commit()
    }
}

/// The path with an ending more: `run.1` is not `run.2`.
fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_escaped_and_both_files_written() {
        let mut page = Page::new("a < b");
        page.paragraph("c & d");
        page.table(&["e>".into()], [vec!["1".into()]].into_iter());
        let directory = tempfile::tempdir().unwrap();
        // The user's own file, whose name is near.
        let neighbour = directory.path().join("report.tmp");
        std::fs::write(&neighbour, "mine").unwrap();
        let path = directory.path().join("report.1");
        page.write(&path, &[1, 2]).unwrap();
        page.write(&directory.path().join("report.2"), &[3]).unwrap();
        let html = std::fs::read_to_string(directory.path().join("report.1.html")).unwrap();
        assert!(html.contains("<h1>a &lt; b</h1><p>c &amp; d</p><table><tr><th>e&gt;</tr><tr><td>1</tr>"), "{html}");
        assert_eq!(std::fs::read_to_string(directory.path().join("report.1.json")).unwrap(), "[\n  1,\n  2\n]");
        assert_eq!(std::fs::read_to_string(neighbour).unwrap(), "mine");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 5, "nothing else is left");
    }
}
