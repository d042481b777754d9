//! What studies print and write.

use std::path::Path;
use std::{fs, io};

use kvpack::backend::Device as _;
use kvpack_cli::this_run;
use kvpack_report::Run;
use kvpack_report::page::{Plot, Point, Scale, Series};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Measure, StudyOptions};

/// A study under way: the files that it writes, and what stands in them.
pub struct StudyReport<'a> {
    study: &'a str,
    program: &'static str,
    device: String,
    model: String,
    options: &'a StudyOptions,
}

/// A file of rows.
#[derive(Serialize)]
struct File<'a, T> {
    study: &'a str,
    run: Run,
    device: &'a str,
    model: &'a str,
    rows: &'a [T],
}

impl<'a> StudyReport<'a> {
    /// Begins the report of a study of a model, and prints the lines before its table.
    pub fn begin<H: Measure>(host: &H, study: &'a str, model: String, options: &'a StudyOptions) -> Self {
        let report = Self { study, program: H::PROGRAM, device: host.backend().name(), model, options };
        let Run { commit, date, command, .. } = report.run();
        let commit = commit.unwrap_or("unknown".into());
        println!("\n{study}: {}; {}; commit {commit}; {date}", report.model, report.device);
        println!("{command}\n");
        report
    }

    /// Steps that are timed.
    pub const fn steps(&self) -> usize {
        self.options.steps
    }

    /// This run. The program is not the command that its decoder is taken from.
    fn run(&self) -> Run {
        let of_command = this_run(String::new(), None);
        let arguments = of_command.command.split_once(' ').map_or("", |(_, arguments)| arguments);
        Run { command: format!("{} {arguments}", self.program), ..of_command }
    }

    /// Writes the JSON file and the plot that the options name.
    pub(super) fn write<T: Serialize>(&self, rows: &[T], plot: impl FnOnce() -> Plot) -> io::Result<()> {
        if let Some(path) = &self.options.json {
            let file = File { study: self.study, run: self.run(), device: &self.device, model: &self.model, rows };
            to_file(path, &serde_json::to_string_pretty(&file)?)?;
        }
        if self.options.plot.is_some() { draw(self.options, &plot()) } else { Ok(()) }
    }
}

/// Writes a plot where an option names its file.
pub(super) fn draw(options: &StudyOptions, plot: &Plot) -> io::Result<()> {
    options.plot.as_ref().map_or(Ok(()), |path| to_file(path, &plot.file()))
}

/// The rows of a file that a report wrote.
pub(super) fn rows_of<T: DeserializeOwned>(path: &Path) -> io::Result<Vec<T>> {
    #[derive(Deserialize)]
    struct Rows<T> {
        rows: Vec<T>,
    }
    let text = fs::read_to_string(path).map_err(|error| named("cannot read", path, error))?;
    let wrong = |error: serde_json::Error| named("no rows of this study are in", path, error.into());
    Ok(serde_json::from_str::<Rows<T>>(&text).map_err(wrong)?.rows)
}

fn to_file(path: &Path, text: &str) -> io::Result<()> {
    fs::write(path, text).map_err(|error| named("cannot write", path, error))
}

/// An error that names its file.
fn named(what: &str, path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
}

/// Prints the heading of a table: columns of text, then columns of numbers.
pub(super) fn heading(text: &[&str], numbers: &[&str]) {
    println!("| {} |", [text, numbers].concat().join(" | "));
    println!("|{}{}", " --- |".repeat(text.len()), " ---: |".repeat(numbers.len()));
}

/// Prints a row of a table.
pub(super) fn row(cells: &[String]) {
    println!("| {} |", cells.join(" | "));
}

/// Lines over a logarithmic axis, in the order of their names' first points.
pub(super) fn lines(title: &str, (x, y): (&str, &str), points: impl Iterator<Item = (String, f64, f64)>) -> Plot {
    let mut series: Vec<Series> = Vec::new();
    for (name, x, y) in points {
        let tip = format!("{name}: {y:.2}");
        let point = Point { x, y, label: String::new(), tip, on_line: true, front: false };
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => series.push(Series { colour: series.len(), name, points: vec![point] }),
        }
    }
    Plot {
        title: title.into(),
        x: x.into(),
        y: y.into(),
        x_scale: Scale::PowersOfTwo,
        y_scale: Scale::Logarithmic,
        series,
        references: Vec::new(),
    }
}
