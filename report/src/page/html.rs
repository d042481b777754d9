//! A page that needs no other file.

use std::fmt::Write;

use super::escaped::escaped;
use super::plot::{self, Plot};

/// What the page looks like: light or dark as the reader's system is, one column on a phone.
const STYLE: &str = include_str!("page.css");
/// Shows the tip of a point when it is pointed at, tapped or reached with the keyboard.
const SCRIPT: &str = include_str!("page.js");

/// A page under construction.
#[derive(Clone, Debug)]
pub struct Html {
    title: String,
    body: String,
}

impl Html {
    /// A page that begins with a headline.
    pub fn new(title: &str) -> Self {
        Self { title: escaped(title), body: format!("<h1>{}</h1>\n", escaped(title)) }
    }

    /// Begins a section.
    pub fn section(&mut self, headline: &str) {
        writeln!(self.body, "<h2>{}</h2>", escaped(headline)).ok();
    }

    /// Adds a paragraph.
    pub fn paragraph(&mut self, text: &str) {
        writeln!(self.body, "<p>{}</p>", escaped(text)).ok();
    }

    /// Adds what the page wants to say first, if there is anything.
    pub fn verdict(&mut self, lines: &[String]) {
        if lines.is_empty() {
            return;
        }
        let lines: String = lines.iter().map(|line| format!("<li>{}</li>", escaped(line))).collect();
        writeln!(self.body, "<ul class=\"verdict\">{lines}</ul>").ok();
    }

    /// Adds plots next to each other where there is room, each with its legend and a caption.
    pub fn plots(&mut self, plots: &[(Plot, String)]) {
        self.body += "<div class=\"plots\">\n";
        for (plot, caption) in plots {
            let entry = |(class, name): (String, String)| {
                let line = format!("<line class=\"{class}\" x1=\"0\" x2=\"24\" y1=\"6\" y2=\"6\"/>");
                format!("<li><svg class=\"swatch\" viewBox=\"0 0 24 12\">{line}</svg>{}</li>", escaped(&name))
            };
            let legend: String = plot.legend().into_iter().map(entry).collect();
            writeln!(
                self.body,
                "<figure><h3>{}</h3><ul class=\"legend\">{legend}</ul>{}<figcaption>{}</figcaption></figure>",
                escaped(&plot.title),
                plot.svg(),
                escaped(caption)
            )
            .ok();
        }
        self.body += "</div>\n";
    }

    /// Adds a table whose first column is text; what stands behind the first line of a cell is small. A row that is
    /// marked stands out.
    pub fn table(&mut self, header: &[&str], rows: impl IntoIterator<Item = (bool, Vec<String>)>) {
        self.body += "<div class=\"wide\"><table><thead><tr>";
        header.iter().for_each(|cell| self.body += &format!("<th>{}</th>", escaped(cell)));
        self.body += "</tr></thead><tbody>\n";
        for (marked, cells) in rows {
            self.body += if marked { "<tr class=\"marked\">" } else { "<tr>" };
            cells.iter().for_each(|text| self.body += &format!("<td>{}</td>", cell(text)));
            self.body += "</tr>\n";
        }
        self.body += "</tbody></table></div>\n";
    }

    /// The whole page.
    pub fn finish(self) -> String {
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <meta name=\"color-scheme\" content=\"light dark\">\
             <link rel=\"icon\" href=\"data:,\"><title>{}</title>\n<style>\n{}{STYLE}</style></head>\n<body>\n{}\
             <div id=\"tip\" role=\"status\" hidden></div>\n<script>\n{SCRIPT}</script>\n</body></html>\n",
            self.title,
            plot::STYLE,
            self.body
        )
    }
}

/// The first line of a cell, and the others below it.
fn cell(text: &str) -> String {
    match text.split_once('\n') {
        Some((first, rest)) => format!("{}<small>{}</small>", escaped(first), escaped(rest)),
        None => escaped(text),
    }
}
